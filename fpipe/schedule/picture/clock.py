"""Times for a schedule that has none: a unit for each of F, I and W, two for B."""

from __future__ import annotations

from itertools import accumulate

from fpipe.schedule.action import Op
from fpipe.schedule.cost import Cost
from fpipe.schedule.earliest import earliest_starts
from fpipe.schedule.grid import Rows
from fpipe.schedule.picture.chart import Chart, draw_up
from fpipe.schedule.timing.event import Event


def unit_chart(schedule: Rows, name: str) -> Chart:
    """The chart of a schedule as if F, I and W took one unit each per rank, and sending none.

    A schedule that cannot run is drawn as its plain rows, and a note says so.

    Example:
        >>> from fpipe.schedule.families.gpipe import gpipe
        >>> unit_chart(gpipe(ranks=2, microbatches=4), "gpipe").makespan
        15.0
    """
    rows, stages = schedule.actions, len(schedule.placement)
    share = len(rows) / stages  # of a rank's unit that a stage takes
    # Other ops take no time.
    lengths: dict[str, float] = {Op.F: share, Op.I: share, Op.W: share, Op.B: 2 * share}
    starts, note = earliest_starts(rows, stages, lengths), "unit costs"
    runs = starts is not None
    if starts is None:
        note = "cannot run as it stands: fpipe.verify says why"
        starts = [
            list(accumulate((lengths.get(action.op, 0) for action in row), initial=0.0))[:-1]
            for row in rows
        ]
    events = [
        [
            Event(rank, action, start, start + lengths.get(action.op, 0))
            for action, start in zip(row, times, strict=True)
        ]
        for rank, (row, times) in enumerate(zip(rows, starts, strict=True))
    ]
    return draw_up(name, schedule.placement, events, Cost(f=1, i=1, w=1), note=note, waits=runs)
