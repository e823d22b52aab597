"""Collects garbage seldom, in whatever process imports it.

Tracing makes many objects that live as long as a pipeline. To look at them again and again, every
few thousand objects, takes a tenth of the time of the tests.
"""

import atexit
import gc

gc.set_threshold(200_000, 20, 100)
atexit.register(gc.unfreeze)  # what is frozen at the end counts as leaked


def after_a_file() -> None:
    """Free what the tests of a file have left, and never look again at what stays.

    Each traced graph has a class of its own, and a trace visits every class of modules twice: with
    thousands of them that would take a twentieth of the time of the tests.
    """
    gc.collect()
    gc.freeze()
