"""Put the whole-stage actions of sharded data parallelism into the rows of a schedule.

    0F0 0F1 0B0 0B1 ──► 0UNSHARD 0F0 0F1 0B0 0B1 0RESHARD 0REDUCE_GRAD

The policy is two numbers: how many stages of a rank are gathered at one time, and how many
microbatches of gradients are added up before they are reduced (FSDP and ZeRO, arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from fpipe.errors import ScheduleError
from fpipe.schedule.action import COMPUTE_OPS, Action, Op
from fpipe.schedule.arguments import plain_integer

STEP = "step"
"""Once a step."""


def sharded_rows(
    rows: Sequence[Sequence[Action]], gather: int | str, reduce: int | str
) -> list[list[Action]]:
    """Rows with `UNSHARD`, `RESHARD` and `REDUCE_GRAD` put in, and no other whole-stage actions.

    Args:
        rows: the actions of each rank.
        gather: as for `Schedule.sharded`.
        reduce: as for `Schedule.sharded`.

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
    number = plain_integer(value)
    if number is None or isinstance(value, bool) or number < 1:
        raise ScheduleError(
            f'{name}={value!r:.60} must be "step", for once a step, or a number of {of}, 1 or more'
        )
    return number


def _segments(row: Sequence[Action]) -> list[tuple[int, list[Action]]]:
    """The row as runs of actions of one stage."""
    segments: list[tuple[int, list[Action]]] = []
    for action in row:
        if not segments or segments[-1][0] != action.stage:
            segments.append((action.stage, []))
        segments[-1][1].append(action)
    return segments


def _gathered(row: Sequence[Action], window: float) -> list[Action]:
    """The row with `UNSHARD` and `RESHARD`, and at most `window` stages gathered at any time.

    The stage that is needed next is gathered while the one before it computes, if there is room;
    to make room, that goes which is needed last (Belady's rule).
    """
    segments = _segments(row)
    stages = list(dict.fromkeys(stage for stage, _ in segments))
    if window >= len(stages):
        return [*(_unshard(stage) for stage in stages), *_until_last_use(row)]
    found: list[Action] = []
    held: list[int] = []

    def next_use(stage: int, after: int) -> float:
        uses = (at for at in range(after, len(segments)) if segments[at][0] == stage)
        return next(uses, inf)

    def gather(stage: int, after: int, keep: int) -> None:
        """Gather a stage, unless there is no room for it but that of what is needed sooner."""
        if stage in held:
            return
        if len(held) >= window:
            rest = [own for own in held if own != keep]
            if not rest:
                return
            last = max(rest, key=lambda own: next_use(own, after))
            if next_use(last, after) < next_use(stage, after):
                return
            held.remove(last)
            found.append(_reshard(last))
        held.append(stage)
        found.append(_unshard(stage))

    for at, (stage, actions) in enumerate(segments):
        gather(stage, at, keep=-1)
        if at + 1 < len(segments):
            gather(segments[at + 1][0], at + 1, keep=stage)
        found += actions
        if next_use(stage, at + 1) == inf:
            held.remove(stage)
            found.append(_reshard(stage))
    return found


def _until_last_use(row: Sequence[Action]) -> Iterator[Action]:
    """The actions of a row, and a `RESHARD` behind the last one of each stage."""
    last = {action.stage: at for at, action in enumerate(row)}
    for at, action in enumerate(row):
        yield action
        if last[action.stage] == at:
            yield _reshard(action.stage)


def _reduced(row: Sequence[Action], every: float) -> list[Action]:
    """The row with `REDUCE_GRAD` of a stage after so many weight gradients, and after the last."""
    left: dict[int, int] = {}
    for stage, op, _ in row:
        left[stage] = left.get(stage, 0) + (op in (Op.W, Op.B))
    since = dict.fromkeys(left, 0)
    found: list[Action] = []
    due: int | None = None
    for action in row:
        stage, op, _ = action
        if due is not None and op in COMPUTE_OPS:
            found.append(_reduce_grad(due))
            due = None
        found.append(action)
        if op in (Op.W, Op.B):
            left[stage] -= 1
            since[stage] += 1
            if since[stage] >= every or not left[stage]:
                due, since[stage] = stage, 0
    return found if due is None else [*found, _reduce_grad(due)]


def _unshard(stage: int) -> Action:
    return Action(stage, Op.UNSHARD, None)


def _reshard(stage: int) -> Action:
    return Action(stage, Op.RESHARD, None)


def _reduce_grad(stage: int) -> Action:
    return Action(stage, Op.REDUCE_GRAD, None)
