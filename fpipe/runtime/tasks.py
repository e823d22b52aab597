"""Tasks: the actions of a schedule that have something to compute, with the values they touch."""

from __future__ import annotations

from typing import NamedTuple

from fpipe.runtime.values import Codes, Computed, Resolver, SumValue, Value
from fpipe.schedule import Action, Op, Schedule
from fpipe.stage.code import StageCode


class Task(NamedTuple):
    """One kernel call.

    Attributes:
        action: the action.
        op: key of the piece in the stage's code.
        code: the stage's code.
        inputs: values read, in the kernel's order.
        outputs: values computed, in the kernel's order.
    """

    action: Action
    op: str
    code: StageCode
    inputs: tuple[Value, ...]
    outputs: tuple[Computed, ...]


class Tasks(NamedTuple):
    """What a step computes.

    Attributes:
        rows: the tasks of each rank, in the order of its actions.
        sums: the value that each sum of parameter gradients ends as.
    """

    rows: tuple[tuple[Task, ...], ...]
    sums: dict[SumValue, Value]


def tasks_of(schedule: Schedule, codes: Codes, resolve: Resolver) -> Tasks:
    """Find the tasks of all ranks.

    The first B or W of a stage starts the sums of its parameter gradients, the others continue
    them. Whole-stage actions have no task: in one process there is nothing to gather or reduce.
    """
    sums: dict[SumValue, Value] = {}
    rows = tuple(
        tuple(
            task for action in row if (task := _task_of(action, codes, resolve, sums)) is not None
        )
        for row in schedule.actions
    )
    return Tasks(rows, sums)


def _task_of(
    action: Action, codes: Codes, resolve: Resolver, sums: dict[SumValue, Value]
) -> Task | None:
    """The task of `action`, which `sums` are brought up to date with."""
    stage, op, microbatch = action
    if microbatch is None:
        return None
    code = codes(stage, microbatch)
    ends_in_sums = op in (Op.B, Op.W)
    continues = ends_in_sums and any(SumValue(stage, leaf) in sums for leaf in code.sums)
    key = f"{op}+" if continues else str(op)
    piece = code.pieces.get(key)
    inputs = [resolve(stage, microbatch, n) for n in (piece.inputs if piece else ())]
    # A sum is not one value but one after the other; from here on each has its own name.
    read = tuple(sums[v] if isinstance(v, SumValue) else v for v in inputs)
    if ends_in_sums:
        for leaf, entry in code.sums.items():
            name = entry.total if continues else entry.start
            sums[SumValue(stage, leaf)] = resolve(stage, microbatch, name)
    if piece is None:
        return None
    outputs = tuple(Computed(stage, microbatch, name) for name in piece.outputs)
    return Task(action, key, code, read, outputs)
