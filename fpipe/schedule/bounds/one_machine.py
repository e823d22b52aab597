"""Rules for the actions of one rank, which runs one at a time, each within a window of time.

An action has a head, before which it cannot start, and a deadline, by which it must end. The rules
find what must come before an action, and so a later head: edge finding looks at sets of actions
(Carlier and Pinson, Management Science 35, 1989; in the form of Nuijten's thesis, 1994), detectable
precedences at pairs (Vilím, Lecture Notes in Computer Science 2470, 2002).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

# Head, time and deadline of an action, and its number. Times are whole ticks, above 0.
Task: TypeAlias = tuple[int, int, int, int]

_NEVER = -(1 << 62)


class Later(NamedTuple):
    """The result of the rules.

    Attributes:
        heads: by number, those that come later than before; None where no order of the actions
            meets all deadlines.
        looks: how many actions were looked at, for all sets together.
    """

    heads: dict[int, int] | None
    looks: int


def later_heads(tasks: Sequence[Task]) -> Later:
    """Heads that follow from the windows of all tasks of a rank.

    Example:
        >>> later_heads([(0, 4, 9, 0), (1, 4, 9, 1), (2, 3, 20, 2)]).heads  # two fill all until 8
        {2: 8}
    """
    tasks = sorted(tasks)
    heads = [task[0] for task in tasks]
    times = [task[1] for task in tasks]
    deadlines = [task[2] for task in tasks]
    later = heads.copy()
    looks = _find_edges(heads, times, deadlines, later)
    if looks < 0:
        return Later(None, -looks)
    looks += _detect_precedences(heads, times, deadlines, later)
    changed = {
        task[3]: head
        for task, before, head in zip(tasks, heads, later, strict=True)
        if head > before
    }
    return Later(changed, looks)


def _find_edges(heads: list[int], times: list[int], deadlines: list[int], later: list[int]) -> int:
    """Put off what does not fit before or among those that must end by a deadline; return the
    number of looks, negative if those do not fit themselves."""
    longest, looks = max(times, default=0), 0
    ends = [0] * len(heads)
    latest_end, within = _NEVER, 0  # of those that must end by a deadline: a limit, and how many
    by_deadline = sorted(range(len(heads)), key=deadlines.__getitem__)
    for deadline, group in groupby(by_deadline, key=deadlines.__getitem__):
        # Those that start later cannot end by then.
        count = bisect_left(heads, deadline)
        looks += count
        for at in group:
            latest_end = max(latest_end, heads[at]) + times[at]
            within += 1
        if latest_end + longest <= deadline:
            continue  # there is room for any other
        work, end = 0, _NEVER  # of those from here on that must end by then
        for at in range(count - 1, -1, -1):
            if deadlines[at] <= deadline:
                work += times[at]
                if heads[at] + work > end:
                    end = heads[at] + work
            ends[at] = end
        if end > deadline:
            return -looks - 1
        latest_end = end
        if end + longest <= deadline or within == count:
            continue  # there is room for any other, or there is no other
        latest = _NEVER  # end of all, if they start with one that is before this
        for at in range(count):
            time = times[at]
            if deadlines[at] <= deadline:
                if heads[at] + work > latest:
                    latest = heads[at] + work
                work -= time
            else:
                if heads[at] + work + time > deadline and ends[at] > later[at]:
                    later[at] = ends[at]
                if latest + time > deadline and end > later[at]:
                    later[at] = end
    return looks


def _detect_precedences(
    heads: list[int], times: list[int], deadlines: list[int], later: list[int]
) -> int:
    """Put off each task behind all that cannot come after it; return the number of looks."""
    count, looks = len(heads), 0
    by_start = sorted(range(count), key=lambda at: deadlines[at] - times[at])
    before: list[int] = []  # those that cannot come after what ends at `end`, in order
    for at in sorted(range(count), key=lambda at: heads[at] + times[at]):
        end = heads[at] + times[at]
        while len(before) < count:
            other = by_start[len(before)]
            if deadlines[other] - times[other] >= end:
                break
            insort(before, other)
        work = 0
        for other in reversed(before):
            if other != at:
                work += times[other]
                if heads[other] + work > later[at]:
                    later[at] = heads[other] + work
        looks += count
    return looks
