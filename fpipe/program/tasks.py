"""Tasks: the actions of a schedule that have something to compute, with the values they touch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from fpipe.graph.joint import BatchLeaf, Param, Source
from fpipe.inputs.signature import Spec
from fpipe.pieces.piece import PREPARE
from fpipe.plan.codes import StageCode
from fpipe.program.replica_collectives import Reductions, Row, with_gathers
from fpipe.program.replica_layout import Replicas
from fpipe.program.values import (
    Codes,
    Computed,
    ParamValue,
    Resolver,
    SumValue,
    Task,
    Value,
    adding,
    update_of,
)
from fpipe.schedule import Action, Op, Schedule


class Tasks(NamedTuple):
    """The tasks of a step.

    Attributes:
        rows: the tasks of each rank, in the order of its actions.
        sums: the value that each sum of parameter gradients ends as; a gradient that is not summed
            has one for each microbatch.
    """

    rows: tuple[list[Task], ...]
    sums: dict[SumValue, Value]


def tasks_of(
    schedule: Schedule,
    codes: Codes,
    resolve: Resolver,
    replicas: Replicas | None = None,
    *,
    updates: bool = False,
) -> Tasks:
    """Find the tasks of all ranks.

    The first B or W of a stage starts the sums of its parameter gradients, the others continue
    them. The parameters that a stage reads may depend on the rows of a microbatch: where one is the
    first to read some parameters but not others, what it starts is added to what there is. A value
    that no microbatch goes into is computed before the first task that reads it, as an UNSHARD.
    Without replicas the whole-stage actions of the schedule itself have no task; with `updates` the
    place of each UPDATE is kept.
    """
    sums: dict[SumValue, Value] = {}
    reductions = None
    if replicas is not None:
        reductions = Reductions(replicas, sums, _specs_of_sums(schedule, codes))
    halved = {(a.stage, a.microbatch) for row in schedule.actions for a in row if a.op == Op.I}

    def work(action: Action) -> Op:
        # A W without an I, of a stage that owes no input gradient, is the whole backward.
        whole = action.op == Op.W and (action.stage, action.microbatch) not in halved
        return Op.B if whole else action.op

    def tasks_in(row: Sequence[Action]) -> Iterator[Task | Action]:
        for action in row:
            if action.microbatch is not None:
                if replicas is None or action.microbatch < replicas.present:
                    yield from _tasks_of(action, work(action), codes, resolve, sums)
            elif action.op == Op.UPDATE:
                if not updates:
                    continue
                if reductions is not None:
                    yield from reductions.settle(action.stage)
                yield update_of(action)
            elif reductions is not None and action.op == Op.REDUCE_GRAD:
                yield from reductions.launch(action.stage)
            elif reductions is not None:
                yield action
        if reductions is not None:
            yield from reductions.finish(sorted({action.stage for action in row}))

    leaves = None if replicas is None else _divided_leaves(schedule, codes, resolve, replicas)
    rows: list[list[Task]] = []
    for rank, actions in enumerate(schedule.actions):
        row: Row = _with_preparations(list(tasks_in(actions)), codes, resolve)
        if replicas is not None and leaves is not None:
            row = with_gathers(row, rank, schedule.placement, replicas, leaves)
        rows.append([task for task in row if isinstance(task, Task)])
    return Tasks(tuple(rows), sums)


def distinct_codes(schedule: Schedule, codes: Codes) -> Iterator[tuple[int, int, StageCode]]:
    """Each code of each stage, with the first microbatch that it runs."""
    for stage in range(schedule.num_stages):
        known: set[int] = set()
        for microbatch in range(schedule.num_microbatches):
            code = codes(stage, microbatch)
            if id(code) not in known:
                known.add(id(code))
                yield stage, microbatch, code


def _specs_of_sums(schedule: Schedule, codes: Codes) -> dict[SumValue, Spec]:
    """The shape and dtype of each sum of gradients by parameters, whoever adds to it."""
    specs: dict[SumValue, Spec] = {}
    for stage, _, code in distinct_codes(schedule, codes):
        for source, entry in code.sums.items():
            if isinstance(source, Param):
                specs.setdefault(_sum_of(stage, source), code.specs[entry.start])
    return specs


def parameters_read(
    schedule: Schedule, codes: Codes, resolve: Resolver
) -> dict[int, list[ParamValue]]:
    """The parameters that the code of each stage reads, in order, whatever microbatches run."""
    read: dict[int, dict[ParamValue, None]] = {}
    for stage, microbatch, code in distinct_codes(schedule, codes):
        for name in dict.fromkeys(name for piece in code.pieces.values() for name in piece.inputs):
            value = resolve(stage, microbatch, name)
            if isinstance(value, ParamValue):
                read.setdefault(stage, {})[value] = None
    return {stage: list(values) for stage, values in read.items()}


def _divided_leaves(
    schedule: Schedule, codes: Codes, resolve: Resolver, replicas: Replicas
) -> dict[int, list[int]]:
    """The leaves of each stage that replicas hold parts of, and that any stage reads."""
    leaves: dict[int, set[int]] = {}
    for values in parameters_read(schedule, codes, resolve).values():
        for value in values:
            if (value.stage, value.leaf) in replicas.divided:
                leaves.setdefault(value.stage, set()).add(value.leaf)
    return {stage: sorted(numbers) for stage, numbers in leaves.items()}


def _with_preparations(row: Row, codes: Codes, resolve: Resolver) -> list[Task | Action]:
    """The tasks of a rank, and those that make what they read of no microbatch."""
    whole: list[Task | Action] = []
    prepared: set[tuple[int, int]] = set()
    for task in row:
        for value in task.inputs if isinstance(task, Task) else ():
            if not isinstance(value, Computed):
                continue
            place = value.stage, value.microbatch
            if place not in prepared and value.name in (code := codes(*place)).prepared:
                prepared.add(place)
                inputs = tuple(resolve(*place, name) for name in code.pieces[PREPARE].inputs)
                action = Action(value.stage, Op.UNSHARD, None)
                whole.append(_running(PREPARE, code, action, value.microbatch, inputs))
        whole.append(task)
    return whole


def _running(
    op: str, code: StageCode, action: Action, microbatch: int, inputs: tuple[Value, ...]
) -> Task:
    """The task that runs a piece of a stage."""
    outputs = code.pieces[op].outputs
    return Task(
        action,
        partial(code.call, op),
        inputs,
        tuple(Computed(action.stage, microbatch, name) for name in outputs),
        tuple(code.specs[name] for name in outputs),
        partial(code.footprint, op),
        code.constants,
    )


def _sum_of(stage: int, source: Source) -> SumValue:
    """The sum of the gradients of a leaf of the caller's."""
    match source:
        case Param(leaf):
            return SumValue(stage, leaf)
        case BatchLeaf(leaf):
            return SumValue(stage, leaf, argument="batch")
    raise AssertionError(f"{source} is no leaf of the caller's")


def _tasks_of(
    action: Action,
    op: Op,
    codes: Codes,
    resolve: Resolver,
    sums: dict[SumValue, Value],
) -> Iterator[Task]:
    """The tasks of `action`, which does the work of `op`; `sums` are brought up to date with it."""
    stage, _, microbatch = action
    assert microbatch is not None
    code = codes(stage, microbatch)
    ends_in_sums = op in (Op.B, Op.W)
    begun = [
        _sum_of(stage, s) in sums for s, entry in code.sums.items() if entry.so_far is not None
    ]
    continues = ends_in_sums and bool(begun) and all(begun)
    key = f"{op}+" if continues else str(op)
    piece = code.pieces.get(key)
    inputs = [resolve(stage, microbatch, n) for n in (piece.inputs if piece else ())]
    # A sum is not one value but one after the other; from here on each has its own name.
    read = tuple(sums[v] if isinstance(v, SumValue) else v for v in inputs)
    if piece is not None:
        yield _running(key, code, action, microbatch, read)
    if ends_in_sums:
        for source, entry in code.sums.items():
            name = entry.total if continues else entry.start
            total = _sum_of(stage, source)
            if entry.so_far is None:
                total = replace(total, microbatch=microbatch)
            gradient = resolve(stage, microbatch, name)
            if total in sums and not continues:
                added = adding(
                    Computed(stage, microbatch, f"sum for {source}"),
                    (sums[total], gradient),
                    code.specs[name],
                )
                yield added
                (gradient,) = added.outputs
            sums[total] = gradient
