"""Better and better bounds, in the course of a search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fpipe.schedule.searching.portfolio import Phase, Standing, Step
from fpipe.schedule.searching.problem import Problem

_LOOKS: Final = 40  # states that take about as long as an iteration


def bounding(problems: Sequence[Problem], standing: Standing, efforts: Sequence[int]) -> Phase:
    """Bounds of each placement that may hold something better, with more and more effort.

    Args:
        problems: one per placement.
        standing: learns of the bounds.
        efforts: as `fpipe.lower_bound` takes them.
    """
    for effort in efforts:
        for problem in problems:
            if not standing.hopeless(problem):
                # Paid for before, so that a short search does not spend all it has on one bound.
                for _ in range(round(effort / _LOOKS)):
                    yield Step(1.0)
                standing.raise_bound(problem, problem.examined(effort).bound)
