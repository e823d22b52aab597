"""Whole-stage actions, put into the rows of a schedule: of sharded parameters, of an optimizer.

    0F0 0F1 0B0 0B1  ──►  0UNSHARD 0F0 0F1 0B0 0B1 0RESHARD 0REDUCE_GRAD
    0F0 0B0 · · 1F0  ──►  0F0 0B0 0UPDATE · 1F0         in the first idle time that is long enough

The policy of sharding is two numbers: how many stages of a rank are gathered at one time, and how
many microbatches of gradients are added up before they are reduced (FSDP and ZeRO, arXiv
1910.02054).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from math import inf
from typing import Final, NamedTuple

from fpipe.errors import ScheduleError
from fpipe.schedule.action import COMPUTE_OPS, SHARDING_OPS, Action, Op
from fpipe.schedule.arguments import plain_count
from fpipe.schedule.cost import Cost
from fpipe.schedule.simulation.clocks import run_rows

_UNIT: Final = Cost(f=1, i=1, w=1, update=1)


def updated_rows(
    placement: Sequence[int], rows: Sequence[Sequence[Action]], microbatches: int, cost: Cost | None
) -> list[list[Action]]:
    """Rows with `UPDATE` put in; those that they had are left out.

    Raises:
        ScheduleError: the rows cannot run, or the cost does not fit them.
    """
    cost = _UNIT if cost is None else cost
    costs = cost.on(placement, len(rows))
    plain = [[action for action in row if action.op != Op.UPDATE] for row in rows]
    times = run_rows(plain, costs, cost.sizes_of(microbatches))
    if any(len(row) != len(ends) for row, ends in zip(plain, times.ends, strict=True)):
        raise ScheduleError("the schedule cannot run: fpipe.verify says why")
    beside = SHARDING_OPS if costs.collective_lane else frozenset()
    return [
        _with_updates(row, starts, ends, costs.update, beside)
        for row, starts, ends in zip(plain, times.starts, times.ends, strict=True)
    ]


def _with_updates(
    row: Sequence[Action],
    starts: Sequence[float],
    ends: Sequence[float],
    update: Sequence[float],
    beside: frozenset[Op],
) -> list[Action]:
    """One row with its updates.

    Ops `beside` do not occupy the rank.
    """
    ready: dict[int, tuple[int, float]] = {}  # stage -> place and time of its last gradient
    for place, (action, end) in enumerate(zip(row, ends, strict=True)):
        if action.op in (Op.W, Op.B, Op.REDUCE_GRAD):
            ready[action.stage] = (place + 1, end)
    occupies = [action.op not in beside for action in row]
    put: dict[int, list[Action]] = {}
    for gap in first_gaps(
        [start if alone else -inf for start, alone in zip(starts, occupies, strict=True)],
        [end if alone else -inf for end, alone in zip(ends, occupies, strict=True)],
        ready,
        update,
    ):
        put.setdefault(gap.place, []).append(Action(gap.stage, Op.UPDATE, None))
    whole: list[Action] = []
    for place in range(len(row) + 1):
        whole += [*put.get(place, []), *row[place : place + 1]]
    return whole


class Gap(NamedTuple):
    """Where an update goes: its stage, the place in the row before which it stands, its end."""

    stage: int
    place: int
    end: float


def first_gaps(
    starts: Sequence[float],
    ends: Sequence[float],
    ready: Mapping[int, tuple[int, float]],
    update: Sequence[float],
) -> list[Gap]:
    """The first idle time that is long enough for each update; the end of the row where none is.

    An action that does not occupy the rank starts and ends at ``-inf``. Per stage, `ready` has the
    place behind its last gradient, and when that is reduced.

    Example:
        >>> first_gaps([0, 4], [1, 5], {0: (1, 1), 1: (2, 5)}, [2, 2])
        [Gap(stage=0, place=1, end=3), Gap(stage=1, place=2, end=7)]
    """
    free = list(accumulate(ends, max, initial=0.0))  # when the rank is, before each action
    gaps = []
    for stage, (first, reduced) in sorted(ready.items(), key=lambda item: item[1]):
        for place in range(first, len(free)):
            end = max(free[place], reduced) + update[stage]
            if place == len(starts) or end <= starts[place]:
                free[place] = end
                gaps.append(Gap(stage, place, end))
                break
    return gaps


STEP = "step"
"""Once a step."""


def sharded_rows(
    rows: Sequence[Sequence[Action]], gather: int | str, reduce: int | str
) -> list[list[Action]]:
    """Rows with `UNSHARD`, `RESHARD` and `REDUCE_GRAD` put in, and no other whole-stage actions.

    The arguments are those of `Schedule.sharded`.

    Raises:
        ScheduleError: one of them is neither ``"step"`` nor a number of at least 1.
    """
    window = _read("gather", gather, "stages")
    every = _read("reduce", reduce, "microbatches")
    plain = [[a for a in row if a.op in COMPUTE_OPS] for row in rows]
    return [_reduced(_gathered(row, window), every) for row in plain]


def gathered_at_once(row: Sequence[Action]) -> int:
    """The most stages of a rank that are gathered at any time, by its row."""
    held: set[int] = set()
    most = 0
    for stage, op, _ in row:
        if op == Op.UNSHARD:
            held.add(stage)
        elif op == Op.RESHARD:
            held.discard(stage)
        most = max(most, len(held))
    return most


def _read(name: str, value: int | str, of: str) -> float:
    """A policy as a number, which is infinite for once a step."""
    if value == STEP:
        return inf
    number = plain_count(value)
    if number is None:
        raise ScheduleError(
            f'{name}={value!r:.60} must be "step", for once a step, or a number of {of}, 1 or more'
        )
    return number


def _gathered(row: Sequence[Action], window: float) -> list[Action]:
    """The row with `UNSHARD` and `RESHARD`, and at most `window` stages gathered at any time.

    The stage that is needed next is gathered while the one before it computes, if there is room;
    to make room, that goes which is needed last (Belady's rule).
    """
    segments = [(stage, list(run)) for stage, run in groupby(row, key=lambda each: each.stage)]
    stages = list(dict.fromkeys(stage for stage, _ in segments))
    if window >= len(stages):
        return [*(Action(stage, Op.UNSHARD, None) for stage in stages), *_until_last_use(row)]
    gathered: list[Action] = []
    held: list[int] = []

    def next_use(stage: int, after: int) -> float:
        uses = (at for at in range(after, len(segments)) if segments[at][0] == stage)
        return next(uses, inf)

    def gather(stage: int, after: int, keep: int) -> None:
        """Gather a stage, unless there is no room for it but that of what is needed sooner."""
        if stage in held:
            return
        if len(held) >= window:
            rest = [other for other in held if other != keep]
            if not rest:
                return
            last = max(rest, key=lambda other: next_use(other, after))
            if next_use(last, after) < next_use(stage, after):
                return
            held.remove(last)
            gathered.append(Action(last, Op.RESHARD, None))
        held.append(stage)
        gathered.append(Action(stage, Op.UNSHARD, None))

    for at, (stage, actions) in enumerate(segments):
        gather(stage, at, keep=-1)
        if at + 1 < len(segments):
            gather(segments[at + 1][0], at + 1, keep=stage)
        gathered += actions
        if next_use(stage, at + 1) == inf:
            held.remove(stage)
            gathered.append(Action(stage, Op.RESHARD, None))
    return gathered


def _until_last_use(row: Sequence[Action]) -> Iterator[Action]:
    """The actions of a row, and a `RESHARD` behind the last one of each stage."""
    last = {action.stage: at for at, action in enumerate(row)}
    for at, action in enumerate(row):
        yield action
        if last[action.stage] == at:
            yield Action(action.stage, Op.RESHARD, None)


def _reduced(row: Sequence[Action], every: float) -> list[Action]:
    """The row with `REDUCE_GRAD` of a stage after so many weight gradients, and after the last."""
    left = Counter(stage for stage, op, _ in row if op in (Op.W, Op.B))
    since: Counter[int] = Counter()
    reduced: list[Action] = []
    due: list[Action] = []
    for action in row:
        stage, op, _ = action
        if op in COMPUTE_OPS:
            reduced += due
            due = []
        reduced.append(action)
        if op in (Op.W, Op.B):
            left[stage] -= 1
            since[stage] += 1
            if since[stage] >= every or not left[stage]:
                due, since[stage] = [Action(stage, Op.REDUCE_GRAD, None)], 0
    return reduced + due


def whole_stage_rows(
    placement: Sequence[int], rows: Sequence[Sequence[Action]], microbatches: int, cost: Cost
) -> Sequence[Sequence[Action]]:
    """Rows with the whole-stage actions whose times the cost has, once a step each.

    `UNSHARD`, `RESHARD` and `REDUCE_GRAD` where gathers or reductions take any time, as
    `Schedule.sharded` puts them; `UPDATE` where the optimizer's step does, as `Schedule.updated`
    puts it.
    """
    if cost.shards:
        rows = sharded_rows(rows, STEP, STEP)
    if cost.updates:
        rows = updated_rows(placement, rows, microbatches, cost)
    return rows
