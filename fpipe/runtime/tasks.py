"""Tasks: the actions of a schedule that have something to compute, with the values they touch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from fpipe.runtime.values import Codes, Computed, Resolver, SumValue, Value
from fpipe.schedule import Action, Op, Schedule
from fpipe.shapes import Spec
from fpipe.stage.compiler import Call
from fpipe.stage.joint import BatchLeaf, Param, Source


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
    call: Callable[[], Call]
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
    them. Whole-stage actions have no task: in one process there is nothing to gather or reduce.
    """
    sums: dict[SumValue, Value] = {}
    rows = tuple(
        [task for action in row if (task := _task_of(action, codes, resolve, sums)) is not None]
        for row in schedule.actions
    )
    return Tasks(rows, sums)


def tie(tasks: Tasks, schedule: Schedule, codes: Codes, *, everywhere: bool) -> Tasks:
    """Add up the gradients of a parameter that several stages read.

    Stages number the leaves of one and the same tree, so sums of one leaf belong together. They are
    added in the order of the stages, at the end: by each rank that reads the parameter, which all
    get the same bits, or by the first of them alone. A rank that reads it where no gradient flows
    gets the sum too, or its copy would stay what it was.

    Args:
        tasks: of a function that was cut.
        schedule: of the tasks.
        codes: the code of each stage and microbatch.
        everywhere: on every rank that reads the parameter.
    """
    stages_of: dict[int, list[int]] = defaultdict(list)
    for total in sorted(tasks.sums):
        if total.argument == "params":
            stages_of[total.leaf].append(total.stage)
    sums = dict(tasks.sums)
    readers = readers_of(schedule, codes)
    for leaf, stages in stages_of.items():
        first = {schedule.placement[stages[0]]: stages[0]}
        holders = readers[leaf] if everywhere else first
        if len(stages) == 1 and holders.keys() == first.keys():
            continue
        parts = tuple(tasks.sums[SumValue(stage, leaf)] for stage in stages)
        code = codes(stages[0], 0)
        spec = code.specs[code.sums[Param(leaf)].start]
        for stage in stages:
            del sums[SumValue(stage, leaf)]
        for rank, stage in sorted(holders.items()):
            whole = Computed(stage, -1, f"whole gradient of leaf {leaf}")
            action = Action(stage, Op.REDUCE_GRAD, None)
            needs = footprint_of_sum(spec, len(parts))
            tasks.rows[rank].append(Task(action, lambda: _add_up, parts, (whole,), (spec,), needs))
            sums[SumValue(stage, leaf)] = whole
    return Tasks(tasks.rows, sums)


def readers_of(schedule: Schedule, codes: Codes) -> dict[int, dict[int, int]]:
    """The ranks that read each leaf of shared parameters, each with the first stage that does."""
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for stage, rank in enumerate(schedule.placement):
        code = codes(stage, 0)
        for name in (name for piece in code.pieces.values() for name in piece.inputs):
            source = code.sources.get(name)
            if isinstance(source, Param):
                found[source.leaf].setdefault(rank, stage)
    return found


def _add_up(values: list[Tensor]) -> list[Tensor]:
    """A kernel: the sum of all inputs, from left to right."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    values.clear()
    return [total]


def footprint_of_sum(spec: Spec, terms: int) -> Callable[[frozenset[int]], int]:
    """The `Task.footprint` of a sum from left to right: a new tensor, beside the one before it."""
    return lambda handed: spec.nbytes * min(2, terms - 1)


def _sum_of(stage: int, source: Source) -> SumValue:
    """The sum of the gradients of a leaf of the caller's."""
    match source:
        case Param(leaf):
            return SumValue(stage, leaf)
        case BatchLeaf(leaf):
            return SumValue(stage, leaf, argument="batch")
    raise AssertionError(f"{source} is no leaf of the caller's")


def _task_of(
    action: Action, codes: Codes, resolve: Resolver, sums: dict[SumValue, Value]
) -> Task | None:
    """The task of `action`, which `sums` are brought up to date with."""
    stage, op, microbatch = action
    if microbatch is None:
        return None
    code = codes(stage, microbatch)
    ends_in_sums = op in (Op.B, Op.W)
    continues = ends_in_sums and any(_sum_of(stage, source) in sums for source in code.sums)
    key = f"{op}+" if continues else str(op)
    piece = code.pieces.get(key)
    inputs = [resolve(stage, microbatch, n) for n in (piece.inputs if piece else ())]
    # A sum is not one value but one after the other; from here on each has its own name.
    read = tuple(sums[v] if isinstance(v, SumValue) else v for v in inputs)
    if ends_in_sums:
        for source, entry in code.sums.items():
            name = entry.total if continues else entry.start
            total = _sum_of(stage, source)
            if entry.so_far is None:
                total = total._replace(microbatch=microbatch)
            sums[total] = resolve(stage, microbatch, name)
    if piece is None:
        return None
    outputs = tuple(Computed(stage, microbatch, name) for name in piece.outputs)
    return Task(
        action,
        partial(code.call, key),
        read,
        outputs,
        tuple(code.specs[name] for name in piece.outputs),
        partial(code.footprint, key),
        code.constants,
    )
