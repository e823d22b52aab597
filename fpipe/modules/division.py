"""Divide a chain of parts into stages: for the shortest step, within memory, on any placement.

A stage is a run of adjacent parts. A rank runs all its stages for each microbatch, so the busiest
rank sets the pace of a step; before all ranks keep that pace, a microbatch goes from one to the
next, each time held up by the slowest stage at most:

    time = microbatches * busiest rank + (ranks - 1) * slowest stage

With one stage per rank that is (m + p - 1) times the slowest stage, the time of GPipe and 1F1B;
with several even stages per rank it is that of interleaving (Narayanan et al., arXiv 2104.04473).
The times of a rank are its loads over its speed.

A label of the search stands for one way to choose the first few stages. Where two labels end at the
same part, one that is as good in every respect makes the other needless. With one stage per
rank this is the textbook's dynamic programming.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from itertools import accumulate, pairwise
from math import inf
from operator import le
from typing import NamedTuple

from fpipe.errors import StageError

Memory = Callable[[int, int, int], float]
"""From ``(stage, first, end)`` to the bytes that a stage of these parts needs on its rank."""

WIDTH = 32
"""Labels that are kept for each part at which a stage may end, where ranks have several stages.
Chains of about ten parts need fewer, so that the search is exact there too."""

WIDEST = 16 * WIDTH
"""Labels that are kept at most, where none of `WIDTH` labels fits into memory."""


class Division(NamedTuple):
    """The stages of a chain.

    Attributes:
        ends: for each stage, how many parts it and all stages before it have.
        slowest: the longest time of a stage: its load, by the speed of its rank.
        busiest: the longest time of a rank.
        time: of a step, as above.
        crossing: bytes that cross the boundaries between stages on different ranks.
    """

    ends: tuple[int, ...]
    slowest: float
    busiest: float
    time: float
    crossing: float

    @property
    def figures(self) -> tuple[float, float, float, float]:
        """Time, slowest, busiest and crossing."""
        return self.time, self.slowest, self.busiest, self.crossing


def divide(
    loads: Sequence[float],
    widths: Sequence[float],
    placement: Sequence[int],
    *,
    microbatches: int,
    memory: Memory = lambda stage, first, end: 0.0,
    least: Memory | None = None,
    limit: float = inf,
    slack: float = 0.0,
    speed: Sequence[float] | None = None,
) -> Division:
    """The division whose step is shortest; among those, the one with the narrowest boundaries.

    One part may be so expensive that many divisions of the others are equally good: then the
    others are divided evenly.

    Args:
        loads: the load of each part.
        widths: bytes that cross the boundary after each part but the last.
        placement: the rank of each stage. Every stage has at least one part, and crossing between
            two stages on one rank costs nothing.
        microbatches: their number in a step.
        memory: the memory that a stage needs.
        least: a lower bound of `memory`, None for `memory` itself. In this bound, parts need
            together at most what they need one by one, and the stage that needs least for some
            parts needs least for all parts; so there is a minimum that any division needs for the
            parts that are left.
        limit: bytes of memory of each rank.
        slack: by how much the step may be longer than the shortest, as a fraction, for the sake of
            narrower boundaries.
        speed: of each rank, by which loads are divided; None where all are alike.

    Raises:
        StageError: there are fewer parts than stages, or no division stays within the limit.
    """
    if len(loads) < len(placement):
        raise StageError(
            f"the module has {len(loads)} parts that can be told apart, fewer than the "
            f"{len(placement)} stages of the schedule: name more candidates, or choose a schedule "
            "with fewer stages"
        )
    speeds = [1.0] * (max(placement) + 1) if speed is None else [*speed]
    search = _Search(loads, widths, placement, microbatches, memory, least or memory, limit, speeds)
    fastest = search.fastest()
    if fastest is None:
        none = f"no division into {len(placement)} stages"
        if search.has_left_out:
            none += f" among the {search.width} most promising ways to each part"
        raise StageError(
            f"{none} keeps every rank within memory={limit:.4g}: allow more, or take more ranks or "
            "more candidates"
        )
    narrowest = search.within(Want.NARROWEST, fastest.time * (1 + slack)) or fastest
    narrowest = min(narrowest, fastest, key=lambda division: (division.crossing, division.time))
    evenest = search.within(Want.EVENEST, *narrowest.figures) or narrowest
    return min(evenest, narrowest, key=search.squares)


class _Search:
    """The search for a division; its arguments are those of `divide`.

    Attributes:
        width: how many labels are kept for each part at which a stage may end.
        has_left_out: whether the last search dropped labels because there were more.
    """

    def __init__(
        self,
        loads: Sequence[float],
        widths: Sequence[float],
        placement: Sequence[int],
        microbatches: int,
        memory: Memory,
        least: Memory,
        limit: float,
        speeds: Sequence[float],
    ) -> None:
        self._speeds = speeds
        self._before = [0.0, *accumulate(loads)]
        self._biggest = max(loads) / max(speeds)
        self._widths = widths
        self._placement = placement
        self._microbatches = microbatches
        self._memory = memory
        self._least = least
        self._limit = limit
        self._ranks = max(placement) + 1
        self.width = inf if self._ranks == len(placement) else WIDTH
        self.has_left_out = False
        self._left = self._least_memory()

    def fastest(self) -> Division | None:
        """The division whose step is shortest."""
        whole = self._before[-1]
        most = self._time(*[whole / min(self._speeds)] * 2)
        # A bound close to the optimum leaves few labels: start at the least that is possible.
        least = self._time(*self._at_least(0.0, 0.0, whole, self._placement))
        spare = 0.1
        while (bound := min(least * (1 + spare), most)) < most:
            if (division := self.within(Want.FASTEST, bound)) is not None:
                return division
            spare *= 3
        while (
            (division := self.within(Want.FASTEST, most)) is None
            and self.has_left_out
            and self.width < WIDEST
        ):
            # One that was left out may have fitted into memory.
            self.width = min(4 * self.width, WIDEST)
        return division

    def squares(self, division: Division) -> float:
        """The sum of squares of the times of its stages."""
        ends = enumerate(pairwise((0, *division.ends)))
        return sum(self._load(stage, first, end) ** 2 for stage, (first, end) in ends)

    def _load(self, stage: int, first: int, end: int) -> float:
        """The time of a stage of the parts from `first` to `end`."""
        return (self._before[end] - self._before[first]) / self._speeds[self._placement[stage]]

    def within(
        self,
        want: Want,
        time: float,
        slowest: float = inf,
        busiest: float = inf,
        crossing: float = inf,
    ) -> Division | None:
        """The best division within these limits."""
        stages, count = len(self._placement), len(self._before) - 1
        nothing = (0.0,) * self._ranks
        self.has_left_out = False
        reached = {0: [Label(0.0, 0.0, 0.0, 0.0, nothing, nothing, 0.0, ())]}
        for stage in range(stages):
            left = stages - stage - 1
            following: dict[int, list[Label]] = {}
            for first, labels in reached.items():
                for end in range(first + 1 if left else count, count - left + 1):
                    if exceeds(self._time(*[self._load(stage, first, end)] * 2), time):
                        break
                    further = self._further(labels, stage, first, end)
                    following.setdefault(end, []).extend(
                        label
                        for label in further
                        if is_within(label, time, slowest, busiest, crossing)
                    )
            reached = {}
            for end, labels in following.items():
                if labels:
                    reached[end], left_out = _useful(labels, want, self.width)
                    self.has_left_out |= left_out
        whole = min(reached.get(count, []), key=_BEST[want], default=None)
        if whole is None:
            return None
        return Division(whole.ends, whole.slowest, whole.busiest, whole.time, whole.crossing)

    def _further(
        self, labels: Iterable[Label], stage: int, first: int, end: int
    ) -> Iterable[Label]:
        """Labels with one more stage, of the parts from `first` to `end`."""
        rank, later = self._placement[stage], self._placement[stage + 1 :]
        again, open_ranks = rank in later, len(set(later))
        hop = self._widths[end - 1] if later and later[0] != rank else 0.0
        load = self._load(stage, first, end)
        rest = self._before[-1] - self._before[end]
        need = self._memory(stage, first, end) if self._limit < inf else 0.0
        for label in labels:
            used, rank_load = label.memory[rank] + need, label.loads[rank] + load
            if used > self._limit:
                continue
            slowest, busiest = max(label.slowest, load), label.busiest
            loads, memory = label.loads, label.memory
            if again or loads[rank] or memory[rank]:
                loads = (*loads[:rank], rank_load * again, *loads[rank + 1 :])
                memory = (*memory[:rank], used * again, *memory[rank + 1 :])
            # The parts that are left must fit into the ranks that come again, up to rounding.
            if sum(memory) + self._left[stage][end] > open_ranks * self._limit * (1 + 1e-12):
                continue
            if not again:
                busiest = max(busiest, rank_load)
            # The parts that are left go to the ranks that come again, at best evenly.
            least = self._at_least(slowest, busiest, rest, later, loads)
            time = self._time(least[0], max(least[1], *loads))
            yield Label(
                label.crossing + hop,
                time,
                slowest,
                busiest,
                loads,
                memory,
                label.squares + load * load,
                (*label.ends, end),
            )

    def _least_memory(self) -> list[list[float]]:
        """For each stage, and each part where it may end: the bytes that the parts behind need."""
        stages, count = len(self._placement), len(self._before) - 1
        left = [[0.0] * (count + 1) for _ in range(stages)]
        if self._limit < inf:
            for end in range(count):
                least = inf
                for stage in range(stages - 1, 0, -1):
                    least = min(least, self._least(stage, end, count))
                    left[stage - 1][end] = least
        return left

    def _at_least(
        self,
        slowest: float,
        busiest: float,
        rest: float,
        later: Sequence[int],
        loads: Sequence[float] = (),
    ) -> tuple[float, float]:
        """Lower bounds of the slowest stage and the busiest rank.

        Args:
            slowest: of the stages so far.
            busiest: of the ranks that do not come again.
            rest: the load that is left to divide.
            later: the ranks of the stages that are left.
            loads: the time of each rank that comes again, so far.
        """
        if not later:
            return slowest, busiest
        speeds = self._speeds
        slowest = max(slowest, self._biggest, rest / sum(speeds[rank] for rank in later))
        held = sum(load * speeds[rank] for rank, load in enumerate(loads))
        shared = (rest + held) / sum(speeds[rank] for rank in set(later))
        return slowest, max(busiest, slowest, shared)

    def _time(self, slowest: float, busiest: float) -> float:
        return self._microbatches * busiest + (self._ranks - 1) * slowest


class Want(Enum):
    """The aim of a search among the divisions within a bound."""

    FASTEST = "the shortest step"
    NARROWEST = "the narrowest boundaries"
    EVENEST = "the least sum of squares of the stages' loads"


class Label(NamedTuple):
    """One way to choose the first few stages.

    Attributes:
        crossing: bytes that cross the boundaries so far.
        time: a lower bound of the time of a step, whatever stages follow.
        slowest: the longest time of a stage so far.
        busiest: the longest time of a rank that does not come again.
        loads: the time of each rank that comes again.
        memory: the memory of each rank that comes again.
        squares: the sum of squares of the times of the stages.
        ends: as in `Division`.
    """

    crossing: float
    time: float
    slowest: float
    busiest: float
    loads: tuple[float, ...]
    memory: tuple[float, ...]
    squares: float
    ends: tuple[int, ...]


def exceeds(figure: float, limit: float) -> bool:
    """Whether a figure exceeds a limit by more than a rounding error.

    A limit is a figure of another division, added up in another order.
    """
    return figure > limit * (1 + 1e-12)


def is_within(label: Label, time: float, slowest: float, busiest: float, crossing: float) -> bool:
    """Whether a label stays within these limits."""
    return not (
        exceeds(label.time, time)
        or exceeds(label.slowest, slowest)
        or exceeds(max(label.busiest, *label.loads), busiest)
        or exceeds(label.crossing, crossing)
    )


def _useful(labels: Sequence[Label], want: Want, width: float) -> tuple[list[Label], bool]:
    """The labels that no other makes needless, at most `width`.

    Returns:
        The labels, the most promising first, and whether there were more than `width`.
    """
    useful: list[Label] = []
    for label in sorted(labels, key=_ORDER[want]):
        if not any(_covers(other, label, want) for other in useful):
            if len(useful) >= width:
                return useful, True
            useful.append(label)
    return useful, False


def _by_time(label: Label) -> tuple[float, ...]:
    # Among equal ones, those come first whose ranks are even so far.
    return label.time, sum(load * load for load in label.loads)


def _by_width(label: Label) -> tuple[float, ...]:
    return label.crossing, *_by_time(label)


def _by_squares(label: Label) -> tuple[float, ...]:
    return label.squares, *_by_width(label)


# The order in which labels are kept; and the order of complete ones, the best first.
_ORDER: dict[Want, Callable[[Label], tuple[float, ...]]] = {
    Want.FASTEST: _by_time,
    Want.NARROWEST: _by_width,
    Want.EVENEST: _by_squares,
}
_BEST: dict[Want, Callable[[Label], tuple[float, ...]]] = {
    Want.FASTEST: lambda label: (label.time, label.crossing),
    Want.NARROWEST: lambda label: (label.crossing, label.time),
    Want.EVENEST: lambda label: (label.squares,),
}


def _covers(one: Label, other: Label, want: Want) -> bool:
    """Whether `one` is as good as `other`, whatever stages follow."""
    if not (all(map(le, one.loads, other.loads)) and all(map(le, one.memory, other.memory))):
        return False
    if want == Want.EVENEST:  # the other figures are within limits already
        return one.squares <= other.squares and one.crossing <= other.crossing
    return (
        one.slowest <= other.slowest
        and one.busiest <= other.busiest
        and (want == Want.FASTEST or one.crossing <= other.crossing)
    )
