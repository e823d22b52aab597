"""Divide a chain of parts into stages: for the shortest step, under memory, on any placement.

Parts come in a row and stages are runs of them. A rank runs all its stages for each microbatch, so
the busiest rank sets the pace of a step; until all ranks keep that pace, a microbatch goes from one
to the next, each time held up by the slowest stage at most:

    time = microbatches * busiest rank + (ranks - 1) * slowest stage

With one stage a rank that is (m + p - 1) times the slowest stage, what GPipe and 1F1B take; with
several that are even it is what interleaving promises (Narayanan et al., arXiv 2104.04473).

A label of the search stands for one way to take the first few stages; of two that end at the same
part, one that is as good in everything makes the other needless. Where each rank has one stage this
is the textbook's dynamic programming.
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
"""``(stage, first, end)`` to what a stage of these parts needs on its rank."""

WIDTH = 32
"""Labels that are kept for each part at which a stage may end, where ranks have several stages.
Fewer are needed on chains of some ten parts, so that the search is exact there too."""

WIDEST = 16 * WIDTH
"""As many, at most, where none of the fewer that were kept fits into memory."""


class Division(NamedTuple):
    """A chain that was divided.

    Attributes:
        ends: for each stage, how many parts it and all before it have.
        slowest: the biggest load of a stage.
        busiest: the biggest load of a rank.
        time: of a step, as above.
        crossing: what crosses the boundaries between stages on different ranks.
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
) -> Division:
    """The division whose step is shortest; among those, the one with the narrowest boundaries.

    One part may be so dear that the others can be divided in many ways that are as good: then they
    are divided evenly.

    Args:
        loads: of each part.
        widths: what crosses the boundary after each part but the last.
        placement: the rank of each stage. Every stage has at least one part, and what crosses
            between two stages on one rank costs nothing.
        microbatches: of a step.
        memory: what a stage needs.
        least: never more than `memory`, which it is unless told. Of this, parts need together at
            most what they need one by one, and the stage that needs least for some of them needs
            least for all: so there is a least that any division needs of the parts that are left.
        limit: of the memory of a rank.
        slack: how much longer than necessary the step may be, as a fraction, if boundaries are
            narrower then.

    Raises:
        StageError: there are fewer parts than stages, or no division stays within the limit.
    """
    if len(loads) < len(placement):
        raise StageError(
            f"the module has {len(loads)} parts that can be told apart, fewer than the "
            f"{len(placement)} stages of the schedule: name more candidates, or choose a schedule "
            "with fewer stages"
        )
    search = _Search(loads, widths, placement, microbatches, memory, least or memory, limit)
    fastest = search.fastest()
    if fastest is None:
        none = f"no division into {len(placement)} stages"
        if search.has_left_out:
            none += f" among the {search.width} most promising ways to each part"
        raise StageError(
            f"{none} keeps every rank within memory={limit:.4g}: allow more, or take more ranks or "
            "more candidates"
        )
    found = search.within(Want.NARROWEST, fastest.time * (1 + slack)) or fastest
    found = min(found, fastest, key=lambda division: (division.crossing, division.time))
    evenest = search.within(Want.EVENEST, *found.figures) or found
    return min(evenest, found, key=search.squares)


class _Search:
    """A chain that is to be divided; the arguments are those of `divide`.

    Attributes:
        width: how many labels are kept for each part at which a stage may end.
        has_left_out: whether there were more in the last search.
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
    ) -> None:
        self._before = [0.0, *accumulate(loads)]
        self._biggest = max(loads)
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
        most = self._time(whole, whole)
        # A bound close to the optimum leaves few labels: it starts at the least there can be.
        least = self._time(*self._at_least(0.0, 0.0, whole, len(self._placement), self._ranks))
        spare = 0.1
        while (bound := min(least * (1 + spare), most)) < most:
            if (found := self.within(Want.FASTEST, bound)) is not None:
                return found
            spare *= 3
        while (
            (found := self.within(Want.FASTEST, most)) is None
            and self.has_left_out
            and self.width < WIDEST
        ):
            # One that was left out may have fitted into memory.
            self.width = min(4 * self.width, WIDEST)
        return found

    def squares(self, division: Division) -> float:
        """The sum of squares of the loads of its stages."""
        ends = pairwise((0, *division.ends))
        return sum((self._before[end] - self._before[first]) ** 2 for first, end in ends)

    def within(
        self,
        want: Want,
        time: float,
        slowest: float = inf,
        busiest: float = inf,
        crossing: float = inf,
    ) -> Division | None:
        """The best division each of whose figures is within these."""
        stages, count = len(self._placement), len(self._before) - 1
        nothing = (0.0,) * self._ranks
        self.has_left_out = False
        reached = {0: [Label(0.0, 0.0, 0.0, 0.0, nothing, nothing, 0.0, ())]}
        for stage in range(stages):
            left = stages - stage - 1
            following: dict[int, list[Label]] = {}
            for first, labels in reached.items():
                for end in range(first + 1 if left else count, count - left + 1):
                    if exceeds(self._time(*[self._before[end] - self._before[first]] * 2), time):
                        break
                    further = self._further(labels, stage, first, end)
                    following.setdefault(end, []).extend(
                        label
                        for label in further
                        if is_within(label, time, slowest, busiest, crossing)
                    )
            reached = {}
            for end, found in following.items():
                if found:
                    reached[end], left_out = kept(found, want, self.width)
                    self.has_left_out |= left_out
        whole = best(reached.get(count, []), want)
        if whole is None:
            return None
        return Division(whole.ends, whole.slowest, whole.busiest, whole.time, whole.crossing)

    def _further(
        self, labels: Iterable[Label], stage: int, first: int, end: int
    ) -> Iterable[Label]:
        """Labels with one stage more, of the parts from `first` to `end`."""
        rank, later = self._placement[stage], self._placement[stage + 1 :]
        again, open_ranks = rank in later, len(set(later))
        hop = self._widths[end - 1] if later and later[0] != rank else 0.0
        load = self._before[end] - self._before[first]
        rest = self._before[-1] - self._before[end]
        need = self._memory(stage, first, end) if self._limit < inf else 0.0
        for label in labels:
            used, own = label.memory[rank] + need, label.loads[rank] + load
            if used > self._limit:
                continue
            slowest, busiest = max(label.slowest, load), label.busiest
            loads, memory = label.loads, label.memory
            if again or loads[rank] or memory[rank]:
                loads = (*loads[:rank], own * again, *loads[rank + 1 :])
                memory = (*memory[:rank], used * again, *memory[rank + 1 :])
            # What is left must fit into the ranks that come again, but for a rounding error.
            if sum(memory) + self._left[stage][end] > open_ranks * self._limit * (1 + 1e-12):
                continue
            if not again:
                busiest = max(busiest, own)
            # What is left goes to the ranks that come again, at best so that they are even.
            least = self._at_least(slowest, busiest, rest, len(later), open_ranks, sum(loads))
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
        """For each stage, and each part where it may end: what the parts that are left need."""
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
        stages: int,
        ranks: int,
        held: float = 0.0,
    ) -> tuple[float, float]:
        """The slowest stage and the busiest rank, at least, with so much left for so many."""
        if not stages:
            return slowest, busiest
        slowest = max(slowest, self._biggest, rest / stages)
        return slowest, max(busiest, slowest, (rest + held) / ranks)

    def _time(self, slowest: float, busiest: float) -> float:
        return self._microbatches * busiest + (self._ranks - 1) * slowest


class Want(Enum):
    """What is best among the divisions within a bound."""

    FASTEST = "the shortest step"
    NARROWEST = "the narrowest boundaries"
    EVENEST = "the least sum of squares of the stages' loads"


class Label(NamedTuple):
    """One way to take the first few stages.

    Attributes:
        crossing: over the boundaries so far.
        time: at least, whatever follows.
        slowest: the biggest load of a stage so far.
        busiest: the biggest load of a rank that does not come again.
        loads: of each rank that comes again.
        memory: likewise.
        squares: of the loads of the stages, their sum.
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
    """Whether it does by more than a rounding error, for a limit is what another way has taken."""
    return figure > limit * (1 + 1e-12)


def is_within(label: Label, time: float, slowest: float, busiest: float, crossing: float) -> bool:
    """Whether no figure of a label exceeds these."""
    return not (
        exceeds(label.time, time)
        or exceeds(label.slowest, slowest)
        or exceeds(max(label.busiest, *label.loads), busiest)
        or exceeds(label.crossing, crossing)
    )


def best(labels: Sequence[Label], want: Want) -> Label | None:
    """The best of labels of all stages."""
    return min(labels, key=_BEST[want], default=None)


def kept(labels: Sequence[Label], want: Want, width: float) -> tuple[list[Label], bool]:
    """The labels without those that others make needless, not more than so many.

    Returns:
        Them, the most promising first, and whether any were left out because there are too many.
    """
    found: list[Label] = []
    for label in sorted(labels, key=_ORDER[want]):
        if not any(_covers(other, label, want) for other in found):
            if len(found) >= width:
                return found, True
            found.append(label)
    return found, False


def _by_time(label: Label) -> tuple[float, ...]:
    # Of equal ones, those first whose ranks are even so far.
    return label.time, sum(load * load for load in label.loads)


def _by_width(label: Label) -> tuple[float, ...]:
    return label.crossing, *_by_time(label)


def _by_squares(label: Label) -> tuple[float, ...]:
    return label.squares, *_by_width(label)


# In which order labels are kept, and which of the whole ones is the best.
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
    """Whether `one` is as good as `other`, however they go on."""
    if not (all(map(le, one.loads, other.loads)) and all(map(le, one.memory, other.memory))):
        return False
    if want == Want.EVENEST:  # of those that are no worse in all else
        return one.squares <= other.squares and one.crossing <= other.crossing
    return (
        one.slowest <= other.slowest
        and one.busiest <= other.busiest
        and (want == Want.FASTEST or one.crossing <= other.crossing)
    )
