"""Collects garbage seldom, in whatever process imports it.

Tracing makes many objects that live long, and to look at them again and again takes a twentieth of
the time of the tests.
"""

import gc

gc.set_threshold(20_000, 20, 100)
