"""The way of a step through the package stays short: `tests/walk.py` prints it."""

from __future__ import annotations

from tests.walk import walks_of_step

STEADY = (11, 60)
FIRST = (45, 315)
"""The most modules and functions that a step may enter."""


def test_a_step_enters_few_modules_and_functions() -> None:
    for walk, most in zip(walks_of_step(), (FIRST, STEADY), strict=True):
        entered = len(walk.modules), len(walk.calls)
        assert entered[0] <= most[0] and entered[1] <= most[1], (entered, walk.modules)
