"""Gradients of a parameter that several stages read, where microbatches are not summed.

Each microbatch then has a sum of its own, over the stages: it is made as soon as its parts are
there, so that they can go, and folded only then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from fpipe.runtime.tasks import Task, Tasks, holders_of, reading_stages, sum_task
from fpipe.runtime.values import Codes, Computed, SumValue, Value
from fpipe.schedule import Schedule
from fpipe.stage.joint import Param, Sum
from fpipe.stage.sink import Sink

Place = tuple[int, int]
"""A leaf and a microbatch."""


def tie_apart(
    tasks: Tasks, schedule: Schedule, codes: Codes, sink: Sink, *, everywhere: bool
) -> Tasks:
    """Add up the stages' parts of the gradient of each microbatch by a parameter.

    They are added in the order of the stages: by each rank that reads the parameter, or by the
    first of them alone.

    Args:
        tasks: of a function that was cut.
        schedule: of the tasks.
        codes: the code of each stage and microbatch.
        sink: what is kept of the sums.
        everywhere: on every rank that reads the parameter, unless the sink gives all ranks all.
    """
    stages_of: dict[Place, list[int]] = defaultdict(list)
    for total in sorted(tasks.sums):
        stages_of[total.leaf, total.microbatch].append(total.stage)
    sums = dict(tasks.sums)
    every = everywhere and not sink.everywhere
    reading = reading_stages(schedule, codes) if every else None
    added: dict[Place, list[tuple[int, Task]]] = {}
    for (leaf, microbatch), stages in stages_of.items():
        code = codes(stages[0], microbatch)
        entry: Sum = code.sums[Param(leaf)]
        holders = holders_of(leaf, stages, reading, schedule)
        if len(stages) == len(holders) == 1 and entry.folded:
            continue
        fold = None if entry.folded else sink.fold
        parts = tuple(sums.pop(SumValue(stage, leaf, microbatch)) for stage in stages)
        group = added[leaf, microbatch] = []
        for rank, stage in sorted(holders.items()):
            total = SumValue(stage, leaf, microbatch)
            task = sum_task(total, parts, code.specs[entry.start], fold)
            group.append((rank, task))
            sums[total] = task.outputs[0]
    return Tasks(_woven(tasks.rows, added), sums)


def _woven(
    rows: Sequence[list[Task]], added: dict[Place, list[tuple[int, Task]]]
) -> tuple[list[Task], ...]:
    """The rows with further tasks, each as early as its inputs are there on any rank.

    Whatever a task waits for stands before it in one order of all tasks, so no ranks can wait for
    each other.
    """
    missing: dict[Place, set[Value]] = {}
    readers: dict[Value, list[Place]] = defaultdict(list)
    for place, group in added.items():
        missing[place] = {value for value in group[0][1].inputs if isinstance(value, Computed)}
        for value in missing[place]:
            readers[value].append(place)
    woven: tuple[list[Task], ...] = tuple([] for _ in rows)
    for rank, task in _in_one_order(rows):
        woven[rank].append(task)
        for value in task.outputs:
            for place in readers.get(value, ()):
                missing[place].discard(value)
                if not missing[place]:
                    for holder, further in added[place]:
                        woven[holder].append(further)
    return woven


def _in_one_order(rows: Sequence[list[Task]]) -> Iterator[tuple[int, Task]]:
    """All tasks with their ranks, each behind those that make what it reads."""
    made: set[Value] = set()
    places = [0] * len(rows)
    going = True
    while going:
        going = False
        for rank, row in enumerate(rows):
            if places[rank] == len(row):
                continue
            task = row[places[rank]]
            if all(value in made for value in task.inputs if isinstance(value, Computed)):
                made.update(task.outputs)
                places[rank] += 1
                going = True
                yield rank, task
    assert places == list(map(len, rows)), "the tasks wait for each other"
