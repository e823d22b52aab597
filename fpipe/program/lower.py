"""Lowering: from a schedule and the code of its stages to one Program per rank.

actions ── tasks ──► who reads what ── mail ──► order of instructions ── slots ──► Program
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator

from fpipe.inputs.signature import UPDATING, Goal
from fpipe.program.assembly import Ends, assemble
from fpipe.program.communication import DIRECT, Windows, plan_mail, weave
from fpipe.program.offloading import Offloading, with_copies
from fpipe.program.program import Program
from fpipe.program.replicas import Replicas
from fpipe.program.tasks import Tasks, parameters_read, tasks_of
from fpipe.program.tied import tie
from fpipe.program.updating import Updates, with_updates
from fpipe.program.values import Codes, ParamValue, Resolver
from fpipe.schedule import Schedule
from fpipe.spec.objective import SUM, Sink


def lower(
    schedule: Schedule,
    codes: Codes,
    windows: Windows = DIRECT,
    runs_here: Callable[[int], bool] = lambda rank: True,
    *,
    tied: bool = False,
    sink: Sink = SUM,
    replicas: Replicas | None = None,
    goal: Goal = "step",
    late: Collection[tuple[int, int]] = (),
    offloading: Offloading | None = None,
) -> tuple[Program, ...]:
    """Lower `schedule` to one program per rank.

    Args:
        schedule: a schedule that `fpipe.verify` accepts.
        codes: the code of each stage and microbatch.
        windows: how far communication may run ahead.
        runs_here: which ranks run in this process; the kernels of the others are not compiled, and
            their programs are there to be read.
        tied: stages number the leaves of one tree of parameters, and may share some.
        sink: how gradients are collected, and who gets them.
        replicas: how replicas share parameters and add up gradients; None for no replicas.
        goal: ``"update"`` and ``"clip"`` update each stage where the schedule has its UPDATE.
        late: stage and leaf of parameters that are not updated within, for their gradients are not
            whole then.
        offloading: of parameters that live on the CPU; None where they lie on the devices.
    """
    resolve = Resolver(codes)
    present = schedule.num_microbatches if replicas is None else replicas.present
    if any(codes(stage, 0).updates for stage in range(schedule.num_stages)):
        resolve.follow_states(schedule.num_stages, present)
    tasks = tasks_of(schedule, codes, resolve, replicas, updates=goal in UPDATING)
    if tied:
        several = not all(map(runs_here, range(schedule.num_ranks)))
        tasks = tie(tasks, schedule, codes, sink, everywhere=several, replicas=replicas)
    if offloading is not None:
        tasks = with_copies(tasks, offloading, tied=tied)
    updates: Updates = {}
    if goal in UPDATING:
        tasks, updates = with_updates(tasks, schedule, late, settles=offloading is not None)
    ends = _ends_of(tasks, schedule, codes, resolve, sink, present)
    for total, updated in updates.items():
        rank = schedule.placement[total.stage]
        ends[rank].updates.append((total, updated))
        if goal == "update":
            ends[rank].grads.remove((total, tasks.sums[total]))
    if present < schedule.num_microbatches:
        # A replica without rows reads what the others do, as far as anyone asks.
        for read in parameters_read(schedule, codes, resolve).values():
            for value in read:
                ends[schedule.placement[value.stage]].params.append(value)
    results = [end.values for end in ends]
    mail = plan_mail(tasks.rows, schedule.placement, results)
    return tuple(
        assemble(
            rank,
            weave(rank, row, results[rank], mail, windows),
            ends[rank],
            compiled=runs_here(rank),
        )
        for rank, row in enumerate(tasks.rows)
    )


def _ends_of(
    tasks: Tasks, schedule: Schedule, codes: Codes, resolve: Resolver, sink: Sink, present: int
) -> list[Ends]:
    """The values that each rank holds after `present` microbatches."""
    ends = [Ends() for _ in schedule.actions]
    for total, value in tasks.sums.items():
        # Gradients by the batch are collected on the rank where the batch comes in.
        stage = 0 if total.argument == "batch" else total.stage
        ranks = range(schedule.num_ranks) if sink.everywhere else [schedule.placement[stage]]
        for rank in ranks:
            ends[rank].grads.append((total, value))
    # Microbatches of another size may make a leaf in another stage: a copy may be none there. All
    # go to one rank, which puts them together.
    homes: dict[int, int] = defaultdict(int)
    returned = list(_returned(schedule.num_stages, present, codes))
    for _, stage, number, _ in returned:
        homes[number] = max(homes[number], stage)
    for microbatch, stage, number, name in returned:
        value = resolve(stage, microbatch, name)
        ends[schedule.placement[homes[number]]].outputs.append((microbatch, number, value))
    latest = max(0, present - 1)
    for stage in range(schedule.num_stages):
        for leaf, name in codes(stage, latest).updates.items():
            # A threaded state is small, and every rank holds it afterwards. Without a
            # microbatch it is the caller's.
            left = resolve(stage, latest, name) if present else ParamValue(stage, leaf)
            for end in ends:
                end.states.append((leaf, left))
    return ends


def _returned(stages: int, microbatches: int, codes: Codes) -> Iterator[tuple[int, int, int, str]]:
    """Microbatch, stage, number and name of each value that the caller gets."""
    for microbatch in range(microbatches):
        for stage in range(stages):
            for number, name in codes(stage, microbatch).returned:
                yield microbatch, stage, number, name
