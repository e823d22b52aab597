"""The choices beside an order: the layers of each stage, and the stages that compute again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product
from typing import Final

from fpipe.errors import ScheduleError
from fpipe.schedule.cost import Cost, joined, values_per_stage
from fpipe.schedule.placements import linear, looped, waves
from fpipe.schedule.searching.choosing import Choice, Task

_STAGES: Final = 4  # a rank, at most
_EVERY: Final = 5  # stages: for so many, all choices of those that compute again are tried


class Cuts:
    """Choices of a chain of layers into stages, for a cost that has a value for each layer."""

    name: Final = "cut"

    def __init__(self, cost: Cost) -> None:
        lengths = {len(value) for value in values_per_stage(cost).values()}
        if len(lengths) != 1:
            raise ScheduleError(
                "cut=True cuts a chain of layers: give the cost a value for each layer, as many "
                f"in each of its sequences, not {' and '.join(map(str, sorted(lengths))) or 'none'}"
            )
        (self.layers,) = lengths
        self.speed = cost.speed
        # Each layer by itself, on one rank of speed 1.
        self.work = replace(cost, speed=None, comm=0, transfer=0).on([0] * self.layers).work

    def placements(self, ranks: int) -> list[tuple[int, ...]]:
        """Linear, V, waves and looped ones of up to four stages a rank, as layers allow."""
        every = [linear(ranks), waves(ranks, 2), waves(ranks, 4)]
        every += [looped(ranks, stages) for stages in range(2, _STAGES + 1)]
        fitting = (placement for placement in every if len(placement) <= self.layers)
        return list(dict.fromkeys(fitting)) or [linear(ranks)]

    def complete(self, placement: Sequence[int]) -> bool:
        """Whether `usual` has all cuts."""
        return len(placement) == self.layers

    def cost_of(self, cost: Cost, cut: Choice, placement: Sequence[int]) -> Cost:
        """The cost of the stages of a cut."""
        if sum(cut) != self.layers:
            raise ScheduleError(f"{self.layers} layers are too few for {len(cut)} stages")
        return joined(cost, cut)

    def usual(self, placement: Sequence[int]) -> Iterator[Choice]:
        """The even cut, and the one whose busiest rank has least to do."""
        stages = len(placement)
        if stages > self.layers:
            yield (1,) * stages  # of which there is no cost
            return
        ends = [self.layers * stage // stages for stage in range(stages + 1)]
        cut = tuple(end - start for start, end in pairwise(ends))
        yield cut
        load = self._load(cut, placement)
        better = True
        while better:  # boundaries move as long as that helps
            better = False
            for other in self.neighbours(cut):
                if (least := self._load(other, placement)) < load:
                    cut, load, better = other, least, True
        yield cut

    def _load(self, cut: Choice, placement: Sequence[int]) -> tuple[float, float]:
        """The time of the busiest rank, and a measure of how evenly all are busy."""
        times = [0.0] * (max(placement) + 1)
        ends = accumulate(cut, initial=0)
        for rank, (start, end) in zip(placement, pairwise(ends), strict=True):
            speed = 1 if self.speed is None else self.speed[rank]
            times[rank] += sum(self.work[start:end]) / speed
        return max(times), sum(time * time for time in times)

    def neighbours(self, cut: Choice) -> Iterator[Choice]:
        """The cuts in which one layer belongs to another stage, the next before or behind."""
        for giver in range(len(cut)):
            for taker in (giver - 1, giver + 1):
                if 0 <= taker < len(cut) and cut[giver] > 1:
                    changed = list(cut)
                    changed[giver] -= 1
                    changed[taker] += 1
                    yield tuple(changed)

    def bound_of_all(self, task: Task, placement: tuple[int, ...]) -> float:
        """A bound of every cut: the ranks share all work, by their speeds."""
        cost, ranks = task.cost, max(placement) + 1
        speeds = (1.0,) * ranks if cost.speed is None else cost.speed[:ranks]
        amount = sum(cost.sizes_of(task.microbatches)) * sum(self.work)
        return amount * (cost.pair or 1) / sum(speeds)


class Recomputing:
    """Choices of ``"full"`` or ``"none"`` for each stage.

    The usual ones are those that are made by hand: none, all, the first stages or the stages of the
    first ranks.
    """

    name: Final = "remat"

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

    def usual(self, placement: Sequence[int]) -> Iterator[Choice]:
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
