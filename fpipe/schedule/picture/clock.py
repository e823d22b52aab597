"""Times for a schedule that has none: a unit for each of F, I and W, two for B."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fpipe.schedule.action import Action, Op
from fpipe.schedule.cost import Cost
from fpipe.schedule.dependencies import chain, dependencies
from fpipe.schedule.grid import Rows
from fpipe.schedule.memory import Timed
from fpipe.schedule.picture.chart import Chart, draw_up

UNITS: Final = Cost(f=1, i=1, w=1)
_LENGTH: Final = {Op.F: 1, Op.I: 1, Op.W: 1, Op.B: 2}  # other ops take no time


def unit_chart(schedule: Rows, name: str) -> Chart:
    """The chart of a schedule as if F, I and W took one unit each per rank, and sending none.

    A schedule that cannot run is drawn as its plain rows, and a note says so.

    Example:
        >>> from fpipe.schedule.families.gpipe import gpipe
        >>> unit_chart(gpipe(ranks=2, microbatches=4), "gpipe").makespan
        15.0
    """
    events, note = _timed(schedule), "unit costs"
    if events is None:
        events, note = _packed(schedule), "cannot run as it stands: fpipe.verify says why"
    return draw_up(name, schedule.placement, events, UNITS, note=note)


def _timed(schedule: Rows) -> list[list[Timed]] | None:
    """Each action as soon as its rank is free and its inputs are there; None where it deadlocks."""
    stages = range(len(schedule.placement))
    if any(action.stage not in stages for row in schedule.actions for action in row):
        return None
    graph = dependencies(schedule.actions, chain(len(stages)))
    ends = [0.0] * len(graph.actions)
    events: list[list[Timed]] = [[] for _ in schedule.actions]
    for number in graph.run_order():
        action = graph.actions[number]
        rank, at = graph.place(number)
        needs = (*graph.needs[number], number - 1) if at else graph.needs[number]
        start = max((ends[need] for need in needs), default=0.0)
        ends[number] = start + _length(schedule, action)
        events[rank].append((rank, action, start, ends[number]))
    return events if sum(map(len, events)) == len(ends) else None


def _packed(schedule: Rows) -> list[list[Timed]]:
    """Each row without a gap."""
    return [_row(schedule, rank, row) for rank, row in enumerate(schedule.actions)]


def _row(schedule: Rows, rank: int, row: Sequence[Action]) -> list[Timed]:
    events: list[Timed] = []
    now = 0.0
    for action in row:
        events.append((rank, action, now, now + _length(schedule, action)))
        now = events[-1][3]
    return events


def _length(schedule: Rows, action: Action) -> float:
    return _LENGTH.get(action.op, 0) * len(schedule.actions) / len(schedule.placement)
