"""Gradients of a parameter that several stages read: their parts are added up.

Where microbatches are summed, the stages' sums are added at the end. Where they are not, each
microbatch has a sum of its own over the stages: it is made as soon as its parts are there, so that
they can go, and folded only then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from fpipe.graph.joint import Param, Sum
from fpipe.inputs.signature import Spec
from fpipe.program.replica_layout import Replicas
from fpipe.program.tasks import Tasks, distinct_codes
from fpipe.program.values import Codes, Computed, SumValue, Task, Value, adding
from fpipe.schedule import Schedule
from fpipe.spec.objective import Sink

Gradient = tuple[int, int]
"""A leaf and a microbatch, -1 for the sum over all."""

Added = dict[Gradient, list[tuple[int, Task]]]
"""The tasks that make a sum over the stages, each with its rank."""


def tie(
    tasks: Tasks,
    schedule: Schedule,
    codes: Codes,
    sink: Sink,
    *,
    everywhere: bool,
    replicas: Replicas | None = None,
) -> Tasks:
    """Add up the stages' parts of each gradient.

    Stages number the leaves of one and the same tree, so what they have of one leaf belongs
    together. It is added in the order of the stages: by each rank that reads the parameter, which
    all get the same bits, or by the first of them alone. A rank that reads it where no gradient
    flows gets the sum too, or its copy would stay what it was.

    `everywhere` chooses the former, unless the sink gives all ranks all.
    """
    stages_of: dict[Gradient, list[int]] = defaultdict(list)
    for total in sorted(tasks.sums):
        if total.argument == "params":
            stages_of[total.leaf, total.microbatch].append(total.stage)
    every = everywhere and not sink.everywhere
    reading = _reading_stages(schedule, codes) if every else None
    sums = dict(tasks.sums)
    added: Added = {}
    for (leaf, microbatch), stages in stages_of.items():
        entry, spec = _entry_of(leaf, stages[0], microbatch, schedule, codes)
        if replicas is not None:
            spec = replicas.local(stages[0], leaf, spec)
        holders = _holders_of(leaf, stages, reading, schedule)
        if len(stages) == len(holders) == 1 and entry.folded:
            continue
        fold = None if entry.folded else sink.fold
        parts = tuple(sums.pop(SumValue(stage, leaf, microbatch)) for stage in stages)
        group = added[leaf, microbatch] = []
        for rank, stage in sorted(holders.items()):
            whole = Computed(stage, microbatch, f"whole gradient of leaf {leaf}")
            task = adding(whole, parts, spec, fold)
            group.append((rank, task))
            sums[SumValue(stage, leaf, microbatch)] = whole
    put = _at_the_end if sink.join is None else _woven
    return Tasks(put(tasks.rows, added), sums)


def _at_the_end(rows: Sequence[list[Task]], added: Added) -> tuple[list[Task], ...]:
    """The rows with further tasks after all others."""
    further = [pair for group in added.values() for pair in group]
    return tuple(
        [*row, *(task for holder, task in further if holder == rank)]
        for rank, row in enumerate(rows)
    )


def _woven(rows: Sequence[list[Task]], added: Added) -> tuple[list[Task], ...]:
    """The rows with further tasks, each as early as its inputs are there on any rank.

    Whatever a task waits for stands before it in one order of all tasks, so no ranks can wait for
    each other.
    """
    missing: dict[Gradient, set[Value]] = {}
    readers: dict[Value, list[Gradient]] = defaultdict(list)
    for gradient, group in added.items():
        missing[gradient] = {value for value in group[0][1].inputs if isinstance(value, Computed)}
        for value in missing[gradient]:
            readers[value].append(gradient)
    woven: tuple[list[Task], ...] = tuple([] for _ in rows)
    for rank, task in _in_one_order(rows):
        woven[rank].append(task)
        for value in task.outputs:
            for gradient in readers.get(value, ()):
                missing[gradient].discard(value)
                if not missing[gradient]:
                    for holder, further in added[gradient]:
                        woven[holder].append(further)
    return woven


def _in_one_order(rows: Sequence[list[Task]]) -> Iterator[tuple[int, Task]]:
    """All tasks with their ranks, each behind those that make what it reads."""
    computed: set[Value] = set()
    done = [0] * len(rows)
    going = True
    while going:
        going = False
        for rank, row in enumerate(rows):
            if done[rank] == len(row):
                continue
            task = row[done[rank]]
            if all(value in computed for value in task.inputs if isinstance(value, Computed)):
                computed.update(task.outputs)
                done[rank] += 1
                going = True
                yield rank, task
    assert done == list(map(len, rows)), "the tasks wait for each other"


def _reading_stages(schedule: Schedule, codes: Codes) -> dict[int, set[int]]:
    """The stages that read each leaf of shared parameters."""
    readers: dict[int, set[int]] = defaultdict(set)
    for stage, _, code in distinct_codes(schedule, codes):
        for name in (name for piece in code.pieces.values() for name in piece.inputs):
            source = code.sources.get(name)
            if isinstance(source, Param):
                readers[source.leaf].add(stage)
    return readers


def _entry_of(
    leaf: int, stage: int, microbatch: int, schedule: Schedule, codes: Codes
) -> tuple[Sum, Spec]:
    """How a stage collects the gradient of a leaf, in a microbatch or in the first that does so."""
    some = range(schedule.num_microbatches) if microbatch < 0 else [microbatch]
    code = next(c for m in some if Param(leaf) in (c := codes(stage, m)).sums)
    entry = code.sums[Param(leaf)]
    return entry, code.specs[entry.start]


def _holders_of(
    leaf: int, stages: Sequence[int], reading: Mapping[int, set[int]] | None, schedule: Schedule
) -> dict[int, int]:
    """The ranks that get the gradient of a shared leaf, each with a stage that stands for it.

    Where it is known which stages are `reading` each leaf, the ranks of all of them get it.
    """
    if reading is None:
        return {schedule.placement[stages[0]]: stages[0]}
    every = sorted({*stages, *reading[leaf]}, reverse=True)
    return {schedule.placement[stage]: stage for stage in every}
