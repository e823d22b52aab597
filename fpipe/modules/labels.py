"""Labels of the search for a division: ways to take the first few stages, and the best of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from operator import le
from typing import NamedTuple


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
