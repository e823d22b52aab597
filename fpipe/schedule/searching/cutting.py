"""The choice of the layers of each stage, together with placement and order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Final

from fpipe.errors import ScheduleError
from fpipe.schedule.cost import PER_STAGE, Cost
from fpipe.schedule.placements import linear, looped, waves
from fpipe.schedule.searching.choosing import Choice, Task

_STAGES: Final = 4  # a rank, at most


class Cuts:
    """Choices of a chain of layers into stages, for a cost that has a value for each layer."""

    def __init__(self, cost: Cost) -> None:
        values = [getattr(cost, name) for name in (*PER_STAGE, "message")]
        lengths = {len(value) for value in values if isinstance(value, tuple)}
        if len(lengths) != 1:
            raise ScheduleError(
                "cut=True cuts a chain of layers: give the cost a value for each layer, as many "
                f"in each of its sequences, not {' and '.join(map(str, sorted(lengths))) or 'none'}"
            )
        (self.layers,) = lengths
        # Each layer by itself, on one rank of speed 1.
        alone = replace(cost, speed=None, comm=0, transfer=0).on([0] * self.layers)
        self.work = [f + b for f, b in zip(alone.f, alone.backward, strict=True)]

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

        def merged(name: str) -> Any:
            value = getattr(cost, name)
            if not isinstance(value, tuple):
                return value
            groups = (value[start:end] for start, end in pairwise(accumulate(cut, initial=0)))
            return tuple(group[-1] if name == "message" else sum(group) for group in groups)

        return replace(cost, **{name: merged(name) for name in (*PER_STAGE, "message")})

    def even(self, placement: Sequence[int]) -> Choice:
        """As many layers for each stage, or nearly."""
        stages = len(placement)
        ends = [self.layers * stage // stages for stage in range(stages + 1)]
        return tuple(end - start for start, end in pairwise(ends))

    def usual(self, cost: Cost, placement: Sequence[int]) -> Iterator[Choice]:
        """The even cut, and the one whose busiest rank has least to do."""
        if len(placement) > self.layers:
            yield (1,) * len(placement)  # of which there is no cost
            return
        cut = self.even(placement)
        yield cut
        load = self._load(cost, cut, placement)
        better = True
        while better:  # boundaries move as long as that helps
            better = False
            for other in self.neighbours(cut):
                if (least := self._load(cost, other, placement)) < load:
                    cut, load, better = other, least, True
        yield cut

    def _load(self, cost: Cost, cut: Choice, placement: Sequence[int]) -> tuple[float, float]:
        """The time of the busiest rank, and a measure of how evenly all are busy."""
        times = [0.0] * (max(placement) + 1)
        ends = accumulate(cut, initial=0)
        for rank, (start, end) in zip(placement, pairwise(ends), strict=True):
            speed = 1 if cost.speed is None else cost.speed[rank]
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
