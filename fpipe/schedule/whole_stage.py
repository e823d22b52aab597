"""The whole-stage actions that a cost has times for, put into rows and schedules without any."""

from __future__ import annotations

from collections.abc import Sequence

from fpipe.schedule.action import Action
from fpipe.schedule.cost import Cost
from fpipe.schedule.schedule import Schedule
from fpipe.schedule.sharding import STEP, sharded_rows
from fpipe.schedule.updating import updated_rows


def whole_stage_rows(
    placement: Sequence[int], rows: Sequence[Sequence[Action]], microbatches: int, cost: Cost
) -> Sequence[Sequence[Action]]:
    """Rows with the whole-stage actions whose times the cost has, once a step each.

    `UNSHARD`, `RESHARD` and `REDUCE_GRAD` where gathers or reductions take any time, as
    `Schedule.sharded` puts them; `UPDATE` where the optimizer's step does, as `Schedule.updated`
    puts it.

    Args:
        placement: the rank of each stage.
        rows: the actions of each rank, which have to be able to run.
        microbatches: how many there are.
        cost: with `unshard`, `reduce_grad` or `update`, or with none of them.
    """
    if cost.shards:
        rows = sharded_rows(rows, STEP, STEP)
    if cost.updates:
        rows = updated_rows(placement, rows, microbatches, cost)
    return rows


def with_whole_stage(schedule: Schedule, cost: Cost) -> Schedule:
    """The schedule with `whole_stage_rows`, under its name; one that has any stays as it is.

    Raises:
        ScheduleError: the schedule cannot run, or the cost does not fit it.

    Example:
        >>> from fpipe import Cost, schedules
        >>> cost = Cost(f=1, i=1, w=1, reduce_grad=2)
        >>> print(*with_whole_stage(schedules.gpipe(ranks=1, microbatches=1), cost).actions[0])
        0UNSHARD 0F0 0B0 0RESHARD 0REDUCE_GRAD
    """
    placement, count = schedule.placement, schedule.num_microbatches
    if schedule.is_sharded or schedule.has_updates or not cost.has_whole_stage:
        return schedule
    rows = whole_stage_rows(placement, schedule.actions, count, cost)
    return Schedule(placement, rows, name=schedule.name)
