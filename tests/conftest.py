"""What every test file shares."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import seldom

# How long an example takes depends on what else the machine does.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Before anything imports torch. The tests' tensors are too small to share between threads, and on a
# busy machine threads that wait for one another make a test ten times slower. Examples and
# benchmarks that a test starts inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Compiling takes most of the time of the tests, and kernels without vector instructions take a
# third less of it. The conformance suite compiles with them, as users do.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# Nobody profiles these kernels by their lines.
os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")
# Tests say what they read of a process's standard error.
os.environ.setdefault("FPIPE_PROGRESS", "0")
# A cache of the checkout's own. In the one that a user's programs share may lie code for narrower
# vectors than this machine's: Inductor's keys do not tell them apart, and it writes out of bounds.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parents[1] / ".cache/inductor"))


class _Deaf(logging.Logger):
    """A logger that pytest cannot hear."""

    def addHandler(self, hdlr: logging.Handler) -> None:
        """Add none."""


# Where this one is heard, torch writes down all that it traces and compiles, for nobody: that is a
# fourteenth of the time of tests that compile. pytest hears all. Before anything imports torch.
logging.setLoggerClass(_Deaf)
logging.getLogger("torch.__trace")
logging.setLoggerClass(logging.Logger)

# Their tests start processes, as do those that carry the mark.
PROCESSES = {"device", "distributed", "first_hour", "hosts"}

# Of the schedule side alone: many short tests, none of which starts a process or compiles.
SHORT = {"cli", "exchange", "laboratory", "picture", "schedule"}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None, item: pytest.Item) -> Iterator[None]:
    """Collect garbage between files, once their fixtures are gone."""
    yield
    if nextitem is None or nextitem.path != item.path:
        seldom.after_a_file()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts processes, skip what needs a CUDA device where there is none, sort.

    Short tests come last. Files are handed out in this order, so no process waits for the last long
    file of another.
    """
    items.sort(key=lambda item: item.path.parent.name in SHORT)
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if item.path.parent.name in PROCESSES or "pair" in fixtures:
            item.add_marker("processes")
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return  # the schedule side's tests start without the second that importing torch takes

    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
