"""Tasks: the actions of a schedule that have something to compute, with the values they touch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fpipe.graph.joint import BatchLeaf, Param, Source
from fpipe.inputs.signature import Spec
from fpipe.pieces.compiler import Boxed
from fpipe.pieces.piece import PREPARE
from fpipe.pieces.stage_code import StageCode
from fpipe.program.values import Codes, Computed, Resolver, SumValue, Value
from fpipe.schedule import Action, Op, Schedule


class Task(NamedTuple):
    """One kernel call.

    Attributes:
        action: the action.
        call: makes the boxed callable, compiling it if it is new.
        inputs: values read, in the kernel's order.
        outputs: values computed, in the kernel's order.
        specs: shape and dtype of each output.
        footprint: bytes that a call needs beyond what is held when it starts, given the numbers of
            the inputs that it alone holds.
        constants: tensors among the inputs that a stage function closes over.
    """

    action: Action
    call: Callable[[], Boxed]
    inputs: tuple[Value, ...]
    outputs: tuple[Computed, ...]
    specs: tuple[Spec, ...]
    footprint: Callable[[frozenset[int]], int]
    constants: tuple[Tensor, ...] = ()


class Tasks(NamedTuple):
    """What a step computes.

    Attributes:
        rows: the tasks of each rank, in the order of its actions.
        sums: the value that each sum of parameter gradients ends as; a gradient that is not summed
            has one for each microbatch.
    """

    rows: tuple[list[Task], ...]
    sums: dict[SumValue, Value]


def tasks_of(schedule: Schedule, codes: Codes, resolve: Resolver) -> Tasks:
    """Find the tasks of all ranks.

    The first B or W of a stage starts the sums of its parameter gradients, the others continue
    them. What a stage reads may depend on the rows of a microbatch: where one is the first to read
    some parameters but not others, what it starts is added to what there is. What no microbatch
    goes into is computed before the first task that reads it, as an UNSHARD. The whole-stage
    actions of the schedule itself have no task.
    """
    sums: dict[SumValue, Value] = {}
    halved = {(a.stage, a.microbatch) for row in schedule.actions for a in row if a.op == Op.I}

    def work(action: Action) -> Op:
        # A W without an I, of a stage that owes no input gradient, is the whole backward.
        whole = action.op == Op.W and (action.stage, action.microbatch) not in halved
        return Op.B if whole else action.op

    rows = [
        [task for action in row for task in _tasks_of(action, work(action), codes, resolve, sums)]
        for row in schedule.actions
    ]
    return Tasks(tuple(_with_preparations(row, codes, resolve) for row in rows), sums)


def _with_preparations(row: Sequence[Task], codes: Codes, resolve: Resolver) -> list[Task]:
    """The tasks of a rank, and those that make what they read of no microbatch."""
    whole: list[Task] = []
    made: set[tuple[int, int]] = set()
    for task in row:
        for value in task.inputs:
            if not isinstance(value, Computed):
                continue
            own = value.stage, value.microbatch
            if own not in made and value.name in codes(*own).prepared:
                made.add(own)
                whole.append(_preparation(*own, codes, resolve))
        whole.append(task)
    return whole


def _preparation(stage: int, microbatch: int, codes: Codes, resolve: Resolver) -> Task:
    """The task that computes what no microbatch goes into."""
    code = codes(stage, microbatch)
    inputs = tuple(resolve(stage, microbatch, name) for name in code.pieces[PREPARE].inputs)
    return _running(PREPARE, code, Action(stage, Op.UNSHARD, None), microbatch, inputs)


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
    action: Action, op: Op, codes: Codes, resolve: Resolver, sums: dict[SumValue, Value]
) -> Iterator[Task]:
    """The tasks of `action`, which does the work of `op`; `sums` are brought up to date with it."""
    stage, _, microbatch = action
    if microbatch is None:
        return
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
            part = resolve(stage, microbatch, name)
            if total in sums and not continues:
                added = adding(
                    Computed(stage, microbatch, f"sum for {source}"),
                    (sums[total], part),
                    code.specs[name],
                )
                yield added
                (part,) = added.outputs
            sums[total] = part


def adding(
    total: Computed,
    parts: tuple[Value, ...],
    spec: Spec,
    fold: Callable[[Tensor], Tensor] | None = None,
) -> Task:
    """The task that adds up parts of a gradient.

    Args:
        total: the sum.
        parts: of it, in order.
        spec: of each part.
        fold: what is kept of the sum; None for all of it.
    """
    kept = spec
    if fold is not None:
        folded = fold(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
        kept = Spec(tuple(folded.shape), folded.dtype)
    # A new tensor each time, beside the one before it.
    needed = spec.nbytes * min(2, len(parts) - (fold is None))
    return Task(
        Action(total.stage, Op.REDUCE_GRAD, None),
        lambda: partial(_add_up, fold),
        parts,
        (total,),
        (kept,),
        lambda handed: needed,
    )


def _add_up(fold: Callable[[Tensor], Tensor] | None, values: list[Tensor]) -> list[Tensor]:
    """A kernel: what is kept of the sum of all inputs, from left to right."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    values.clear()
    return [total if fold is None else fold(total)]
