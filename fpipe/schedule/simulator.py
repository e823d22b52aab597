"""Simulate a schedule: exact start and end of every action under a cost."""

from __future__ import annotations

from itertools import repeat

from fpipe.schedule.arguments import plain_counts, plain_seed
from fpipe.schedule.cost import Cost, check_cost
from fpipe.schedule.schedule import Schedule
from fpipe.schedule.simulation.clocks import run_rows
from fpipe.schedule.simulation.events import Event
from fpipe.schedule.simulation.jitter import Draws, Jitter, plain_jitter, trial_makespans
from fpipe.schedule.timeline import Timeline
from fpipe.schedule.verifier import check_schedule, verify
from fpipe.schedule.whole_stage import whole_stage_rows


def simulate(
    schedule: Schedule,
    cost: Cost,
    *,
    jitter: Jitter | float | None = None,
    trials: int = 200,
    seed: int = 0,
) -> Timeline:
    """The start and end of every action of `schedule` under `cost`.

    A rank runs its actions in order, one at a time, and each starts as soon as the rank is free and
    its input has arrived. A value travels for ``cost.comm`` after its action ends, and occupies no
    rank meanwhile; where ``cost.transfer`` is above 0, it first occupies the link to its reader for
    so long, after the values before it. UNSHARD and REDUCE_GRAD take ``cost.unshard`` and
    ``cost.reduce_grad``, in a lane beside the rank unless ``cost.collective_lane`` is False;
    RESHARD takes no time. UPDATE takes ``cost.update`` on the rank, once the gradients of its stage
    are reduced. With ``cost.pair``, an F and the B behind it run together. A million
    actions take a few seconds.

    Args:
        schedule: any schedule that `fpipe.verify` accepts, also one for evaluation (F alone) or
            for frozen stages: the required ops of a stage are inferred from its actions.
        cost: times, latencies and activations.
        jitter: how times vary, or a number for ``Jitter(each=number)``; None where they do not.
            The events are those without jitter; `Timeline.trials` has the makespans with it.
        trials: how many of them.
        seed: of what is drawn. Actions are drawn by their names, so two schedules under one seed
            meet the same luck.

    Returns:
        The timeline, which computes makespan, span, bubbles, peaks and the critical path on demand.

    Raises:
        ScheduleError: the schedule cannot run (the error of `fpipe.verify`), or the cost does not
            fit its placement; `jitter`, `trials` or `seed` is out of range.

    Example:
        >>> import fpipe
        >>> schedule = fpipe.schedules.one_f_one_b(ranks=4, microbatches=8)
        >>> timeline = fpipe.simulate(schedule, fpipe.Cost(f=1, i=1, w=1))
        >>> timeline.makespan - 8 * 3  # the bubble of 1F1B: (p - 1)(f + b)
        9.0
        >>> timeline.peak
        (4, 3, 2, 1)
    """
    check_schedule(schedule)
    check_cost(cost)
    numbers = {number for row in schedule.actions for _, _, number in row}
    misplaced = any(
        not {stage for stage, _, _ in row} <= set(schedule.stages_of(rank))
        for rank, row in enumerate(schedule.actions)
    )
    if misplaced or any(number is not None and number < 0 for number in numbers):
        verify(schedule)
    if schedule.num_microbatches > len(numbers):
        # Some microbatches have no action. Their tables could be larger than the machine's memory.
        verify(schedule, schedule.required_ops)
    costs = cost.on(schedule.placement, schedule.num_ranks)
    cost.memory_sizes_of(schedule.num_microbatches)  # refuses another number of them
    run = run_rows(schedule.actions, costs, cost.sizes_of(schedule.num_microbatches))
    if not run.whole or None in numbers:
        # The run has seen a fault; the verifier names it.
        verify(schedule, schedule.required_ops)
    events = tuple(
        tuple(map(Event, repeat(rank, len(row)), row, run.starts[rank], run.ends[rank]))
        for rank, row in enumerate(schedule.actions)
    )
    makespans: tuple[float, ...] = ()
    if jitter is not None:
        (count,) = plain_counts(trials=trials)
        draws = Draws(plain_jitter(jitter), count, plain_seed(seed))
        sizes = cost.sizes_of(schedule.num_microbatches)
        makespans = tuple(trial_makespans(schedule.actions, costs, sizes, draws))
    return Timeline(schedule, events, cost, makespans)


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
