"""Tasks that update parameters: the optimizer's step of a stage, where its schedule says so.

    gradients, parameters, moments ── UPDATE ──► parameters, moments, squares of the gradients

A gradient that is whole only at the end, since stages of several ranks have parts of it, is used
there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fpipe.inputs.signature import Spec
from fpipe.program.offloading import settle_all
from fpipe.program.tasks import Tasks
from fpipe.program.values import (
    NOTHING,
    Computed,
    MomentsValue,
    MoveValue,
    ParamValue,
    SumValue,
    Task,
    Value,
    kernel_task,
)
from fpipe.schedule import Action, Op, Schedule

Updates = dict[SumValue, Computed]
"""The updated parameter of each sum of gradients."""


def _move(leaves: Sequence[tuple[int, int]], settles: bool, values: list[Any]) -> list[Any]:
    """A kernel: the optimizer's step of some leaves of a stage.

    Its inputs are the step of one leaf, and of each leaf its gradient, its value and its moments.
    With `settles` gradients are still being copied to the CPU.
    """
    if settles:
        settle_all()
    move, *rest = values
    values.clear()
    rest.reverse()
    moved = []
    for stage, leaf in leaves:
        gradient: Tensor = rest.pop()
        value, moments = rest.pop(), rest.pop()
        moved.append(move(stage, leaf, value, gradient.to(value), moments))
        del gradient
    return moved


def with_updates(
    tasks: Tasks,
    schedule: Schedule,
    late: Collection[tuple[int, int]],
    *,
    settles: bool = False,
) -> tuple[Tasks, Updates]:
    """The tasks with the optimizer's step of each parameter that has a sum of gradients."""
    specs: dict[Value, Spec] = {
        value: spec
        for row in tasks.rows
        for task in row
        for value, spec in zip(task.outputs, task.specs, strict=True)
    }
    updates: Updates = {}
    rows: list[list[Task]] = []
    for rank, row in enumerate(tasks.rows):
        waiting = [
            total
            for total in sorted(tasks.sums)
            if total.argument == "params"
            and total.microbatch < 0
            and schedule.placement[total.stage] == rank
            and (total.stage, total.leaf) not in late
        ]
        missing = {value for value in tasks.sums.values() if isinstance(value, Computed)}
        whole: list[Task] = []
        for task in row:
            if task.action.op == Op.UPDATE:
                stage = task.action.stage
                ready = [
                    total
                    for total in waiting
                    if total.stage == stage and tasks.sums[total] not in missing
                ]
                waiting = [total for total in waiting if total not in ready]
                if ready:
                    whole.append(_update(stage, ready, tasks, specs, updates, settles))
            else:
                missing.difference_update(task.outputs)
                whole.append(task)
        for stage in dict.fromkeys(total.stage for total in waiting):
            rest = [total for total in waiting if total.stage == stage]
            whole.append(_update(stage, rest, tasks, specs, updates, settles))
        rows.append(whole)
    return Tasks(tuple(rows), tasks.sums), updates


def _update(
    stage: int,
    totals: Sequence[SumValue],
    tasks: Tasks,
    specs: dict[Value, Spec],
    updates: Updates,
    settles: bool,
) -> Task:
    inputs: list[Value] = [MoveValue()]
    outputs: list[Computed] = []
    for total in totals:
        leaf = total.leaf
        inputs += [tasks.sums[total], ParamValue(stage, leaf), MomentsValue(stage, leaf)]
        updates[total] = Computed(stage, 0, f"leaf {leaf} after the step")
        outputs.append(updates[total])
    sizes = tuple(specs.get(tasks.sums[total], NOTHING) for total in totals)
    leaves = tuple((total.stage, total.leaf) for total in totals)
    return kernel_task(
        partial(_move, leaves, settles),
        Action(stage, Op.UPDATE, None),
        tuple(inputs),
        tuple(outputs),
        sizes,
        sum(spec.nbytes for spec in sizes),
    )
