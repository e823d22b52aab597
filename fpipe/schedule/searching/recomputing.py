"""The choice of the stages that compute again what they do not keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Final

from fpipe.schedule.cost import Cost
from fpipe.schedule.searching.choosing import Choice, Task

_EVERY: Final = 5  # stages: for so many, all choices are tried


class Recomputing:
    """Choices of ``"full"`` or ``"none"`` for each stage.

    The usual ones are those that are made by hand: none, all, the first stages or the stages of the
    first ranks.
    """

    def complete(self, placement: Sequence[int]) -> bool:
        """Whether `usual` has all choices: stages are few."""
        return len(placement) <= _EVERY

    def cost_of(self, cost: Cost, remat: Choice, placement: Sequence[int]) -> Cost:
        """The cost with a choice."""
        return cost.with_remat(remat, placement)

    def bound_of_all(self, task: Task, placement: tuple[int, ...]) -> float:
        """A bound for every choice: all compute nothing again, and keep the least."""
        nothing = replace(task.cost, recompute=0)
        return task.bound(placement, nothing.with_remat("full", placement))

    def usual(self, cost: Cost, placement: Sequence[int]) -> Iterator[Choice]:
        """All choices of few stages; else of many those that are made by hand."""
        stages = len(placement)
        if self.complete(placement):
            yield from product(("none", "full"), repeat=stages)
            return
        choices: dict[Choice, None] = {}
        for count in range(stages + 1):
            choices[("full",) * count + ("none",) * (stages - count)] = None
        for count in range(1, max(placement) + 1):
            choices[tuple("full" if rank < count else "none" for rank in placement)] = None
        yield from choices

    def neighbours(self, remat: Choice) -> Iterator[Choice]:
        """The choices that differ in one stage."""
        for stage, choice in enumerate(remat):
            other = "none" if choice == "full" else "full"
            yield (*remat[:stage], other, *remat[stage + 1 :])
