"""Collects garbage seldom, in whatever process imports it.

Tracing makes many objects that live as long as a pipeline. To look at them again and again, every
few thousand objects, takes a tenth of the time of the tests.
"""

import gc

gc.set_threshold(200_000, 20, 100)
