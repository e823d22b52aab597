"""Put the optimizer's step of each stage into the rows of a schedule.

0F0 0B0 · · 1F0 ──► 0F0 0B0 0UPDATE · 1F0     in the first idle time that is long enough
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import Final, NamedTuple

from fpipe.errors import ScheduleError
from fpipe.schedule.action import SHARDING_OPS, Action, Op
from fpipe.schedule.clocks import run_rows
from fpipe.schedule.cost import Cost

_UNIT: Final = Cost(f=1, i=1, w=1, update=1)


def updated_rows(
    placement: Sequence[int], rows: Sequence[Sequence[Action]], microbatches: int, cost: Cost | None
) -> list[list[Action]]:
    """Rows with `UPDATE` put in; those that they had are left out.

    Args:
        placement: the rank of each stage.
        rows: the actions of each rank.
        microbatches: how many there are.
        cost: as for `Schedule.updated`.

    Raises:
        ScheduleError: the rows cannot run, or the cost does not fit them.
    """
    cost = _UNIT if cost is None else cost
    costs = cost.on(placement, len(rows))
    plain = [[action for action in row if action.op != Op.UPDATE] for row in rows]
    times = run_rows(plain, costs, cost.sizes_of(microbatches))
    if any(len(row) != len(ends) for row, ends in zip(plain, times.ends, strict=True)):
        raise ScheduleError("the schedule cannot run: fpipe.verify says why")
    beside = SHARDING_OPS if costs.collective_lane else frozenset()
    return [
        _with_updates(row, starts, ends, costs.update, beside)
        for row, starts, ends in zip(plain, times.starts, times.ends, strict=True)
    ]


def _with_updates(
    row: Sequence[Action],
    starts: Sequence[float],
    ends: Sequence[float],
    update: Sequence[float],
    beside: frozenset[Op],
) -> list[Action]:
    """One row with its updates.

    Args:
        row: the actions of a rank.
        starts: when each of them starts.
        ends: when each of them ends.
        update: the time of each stage's update.
        beside: the ops that do not occupy the rank.
    """
    ready: dict[int, tuple[int, float]] = {}  # stage -> place and time of its last gradient
    for place, (action, end) in enumerate(zip(row, ends, strict=True)):
        if action.op in (Op.W, Op.B, Op.REDUCE_GRAD):
            ready[action.stage] = (place + 1, end)
    occupies = [action.op not in beside for action in row]
    put: dict[int, list[Action]] = {}
    for gap in first_gaps(
        [start if alone else -inf for start, alone in zip(starts, occupies, strict=True)],
        [end if alone else -inf for end, alone in zip(ends, occupies, strict=True)],
        ready,
        update,
    ):
        put.setdefault(gap.place, []).append(Action(gap.stage, Op.UPDATE, None))
    whole: list[Action] = []
    for place in range(len(row) + 1):
        whole += [*put.get(place, []), *row[place : place + 1]]
    return whole


class Gap(NamedTuple):
    """Where an update goes: its stage, the place in the row before which it stands, its end."""

    stage: int
    place: int
    end: float


def first_gaps(
    starts: Sequence[float],
    ends: Sequence[float],
    ready: Mapping[int, tuple[int, float]],
    update: Sequence[float],
) -> list[Gap]:
    """The first idle time that is long enough for each update; the end of the row where none is.

    Args:
        starts: when each action of a row starts; ``-inf`` for one that does not occupy the rank.
        ends: when each of them ends, ``-inf`` likewise.
        ready: per stage, the place behind its last gradient, and when that is reduced.
        update: the time of each stage's update.

    Example:
        >>> first_gaps([0, 4], [1, 5], {0: (1, 1), 1: (2, 5)}, [2, 2])
        [Gap(stage=0, place=1, end=3), Gap(stage=1, place=2, end=7)]
    """
    free = list(accumulate(ends, max, initial=0.0))  # when the rank is, before each action
    gaps = []
    for stage, (first, reduced) in sorted(ready.items(), key=lambda item: item[1]):
        for place in range(first, len(free)):
            end = max(free[place], reduced) + update[stage]
            if place == len(starts) or end <= starts[place]:
                free[place] = end
                gaps.append(Gap(stage, place, end))
                break
    return gaps
