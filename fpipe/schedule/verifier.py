"""Prove that a schedule is complete and can run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Final

from fpipe.errors import ScheduleError, a_type
from fpipe.schedule.action import COMPUTE_OPS, WHOLE_STAGE_OPS, Action, Op
from fpipe.schedule.dependencies import Dependencies, dependencies
from fpipe.schedule.schedule import Schedule

Owed = tuple[frozenset[Op], ...]
Requires = str | Sequence[str | Collection[str]]

LEGAL: Final[Mapping[frozenset[str], tuple[frozenset[str], ...]]] = MappingProxyType(
    {
        frozenset("F"): (frozenset("F"),),
        frozenset("FI"): (frozenset("FI"), frozenset("FB")),
        frozenset("FW"): (frozenset("FW"), frozenset("FB"), frozenset("FIW")),
        frozenset("FIW"): (frozenset("FB"), frozenset("FIW")),
    }
)
"""Required ops of a stage, and the ops on one microbatch that satisfy them; see `fpipe.verify`."""


def verify(schedule: Schedule, requires: Requires | None = None) -> None:
    """Prove that a schedule runs every required action once, in an order without deadlock.

    Every stage takes the microbatches 0 to m−1, where m−1 is the greatest that is named. For each
    of them it must run a forward and, as `requires` says, its gradients, all on the rank of the
    placement. Every rank runs its row from left to right. F of a stage reads F of the stage before,
    B and I read F of their stage and B or I of the stage after, and W reads I (or, where a stage
    has no I, what I would read). Sends never block and a message that comes early is kept, so a
    schedule can run if and only if no ranks wait for each other in a circle.

    UNSHARD and RESHARD of a stage must alternate, UNSHARD first; a stage that has any computes only
    while it is unsharded. REDUCE_GRAD of a stage, if there is any, comes after its last W or B, and
    may also come before, after every so many of them. UPDATE, where a schedule has any, stands once
    for each stage that owes W, behind the last W, B and REDUCE_GRAD of the stage.

    It takes some microseconds per action.

    Args:
        schedule: any schedule without SEND_* and RECV_*, which fpipe inserts when it lowers it.
        requires: per stage, which of F, I (input gradient) and W (weight gradient) are required:
            one of "F", "FI", "FW", "FIW", or the same as a set of ops; or one string for all
            stages. None requires all three everywhere. These ops satisfy it:

            - "FIW": F, then B, or I and W.
            - "FI" (frozen, with trained stages before it): F, then I or B.
            - "FW" (the first trained stage): F, then W, or B, or I and W. Its I sends nothing; it
              computes what of the backward W does not.
            - "F" (frozen, nothing before it is trained; or inference): F alone.

            So B is the whole required backward of a stage, and one schedule serves a model with
            more or fewer trained parameters.

    Raises:
        ScheduleError: `schedule` is not a schedule, or breaks a rule. The text names the action,
            its rank, its place in `schedule.actions` and the rule; for a deadlock, all ranks in it.

    Example:
        >>> parse = lambda text: [Action.parse(word) for word in text.split()]
        >>> verify(Schedule([0, 1], [parse("0F0 0B0"), parse("1F0 1B0")]))
        >>> verify(Schedule([0, 1], [parse("0F0"), parse("1F0 1W0")]), requires=["F", "FW"])
        >>> verify(Schedule([0, 1], [parse("0F0 0B0"), parse("1B0 1F0")]))
        Traceback (most recent call last):
        ...
        fpipe.errors.ScheduleError: rank 1 runs 1B0 (actions[1][0]) before 1F0 (actions[1][1]), \
whose result it reads: move 1F0 before it
    """
    check_schedule(schedule)
    owed = owed_by_stage(requires, schedule.num_stages)
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            if fault := _fault(action, rank, schedule.placement):
                raise ScheduleError(f"{action} (actions[{rank}][{position}]) {fault}")
    _check_work(schedule, owed)
    for rank, row in enumerate(schedule.actions):
        check_whole_stage(rank, row, owed)
    _check_updates(schedule, owed)
    check_order(dependencies(schedule.actions))


def check_schedule(schedule: object) -> None:
    """Raise a `ScheduleError` unless `schedule` is a `Schedule`."""
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"schedule={schedule!r:.60} is {a_type(schedule)}: it must be a "
            "fpipe.Schedule, such as fpipe.schedules.zbv(ranks=2, microbatches=4)"
        )


def _fault(action: Action, rank: int, placement: Sequence[int]) -> str | None:
    """The fault of an action by itself, as the end of a sentence; None if there is none."""
    stage, op, microbatch = action
    if not 0 <= stage < len(placement):
        return f"has stage={stage!r:.60}: it must be a number from 0 to {len(placement) - 1}"
    if op in COMPUTE_OPS:
        if microbatch is None or microbatch < 0:
            return f"has microbatch={microbatch!r:.60}: {op} needs a number, 0 or more"
    elif op in WHOLE_STAGE_OPS:
        if microbatch is not None:
            return f"has microbatch={microbatch!r:.60}: {op} is of the whole stage and takes None"
    else:
        return "moves data between ranks, which lowering a schedule inserts: leave it out"
    if placement[stage] != rank:
        return (
            f"is on rank {rank}, and placement[{stage}] puts stage {stage} on rank "
            f"{placement[stage]}: move the action or change the placement"
        )
    return None


def _check_work(schedule: Schedule, owed: Owed) -> None:
    """Check that each stage runs the required ops on each microbatch, all and no others, once."""
    if schedule.num_microbatches == 0:
        raise ScheduleError(
            "actions names no microbatch: a schedule runs at least one, such as 0F0 0B0"
        )
    legal = [LEGAL[ops] for ops in owed]
    done: defaultdict[tuple[int, int], frozenset[str]] = defaultdict(frozenset)
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            stage, op, microbatch = action
            if microbatch is None:
                continue
            before = done[stage, microbatch]
            now = _with(before, op)
            # Everything that passes here can still become legal, so the last loop looks for gaps.
            if op in before or not any(now <= whole for whole in legal[stage]):
                raise ScheduleError(
                    f"{action} (actions[{rank}][{position}]) "
                    + _excess(action, before, row, rank, owed[stage])
                )
            done[stage, microbatch] = now
    for stage, rank in enumerate(schedule.placement):
        for microbatch in range(schedule.num_microbatches):
            ops = done[stage, microbatch]
            if ops not in legal[stage]:
                raise ScheduleError(
                    f"stage {stage} has {_listed(ops)} on microbatch {microbatch} (rank {rank}): "
                    f"it owes {' or '.join(map(_listed, legal[stage]))} on each of the "
                    f"microbatches 0 to {schedule.num_microbatches - 1}"
                )


@cache
def _with(ops: frozenset[str], op: str) -> frozenset[str]:
    return ops | {op}


def _excess(
    action: Action, before: frozenset[str], row: Sequence[Action], rank: int, owed: frozenset[Op]
) -> str:
    """The reason why an action is one too many, as the end of a sentence."""
    if action.op in before:
        return f"repeats actions[{rank}][{row.index(action)}]: each action runs once, leave one out"
    if any(action.op in whole for whole in LEGAL[owed]):
        return (
            f"does not go with {_listed(before)}: B is the whole backward, I and W in one, so a "
            "microbatch has either B or its parts"
        )
    return (
        f"is not owed: stage {action.stage} owes {_listed(owed)}; leave it out, or add its op to "
        "requires"
    )


def _listed(ops: Collection[str]) -> str:
    return "+".join(op for op in "FBIW" if op in ops) or "nothing"


def check_whole_stage(rank: int, row: Sequence[Action], owed: Owed) -> None:
    """Check UNSHARD, RESHARD and REDUCE_GRAD in the row of a rank.

    Raises:
        ScheduleError: UNSHARD and RESHARD of a stage do not alternate, a stage that has any
            computes while it is not unsharded, or REDUCE_GRAD has no new gradient to reduce, or
            misses that of the last W or B of its stage.

    Example:
        >>> row = [Action.parse(text) for text in "0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD".split()]
        >>> check_whole_stage(0, row, (frozenset("FIW"),))
    """
    whole = [action for action in row if action.op in WHOLE_STAGE_OPS]
    if not whole:
        return
    unsharded = {stage: False for stage, op, _ in whole if op in (Op.UNSHARD, Op.RESHARD)}
    reduces = {stage for stage, op, _ in whole if op == Op.REDUCE_GRAD}
    last: dict[int, int] = {}  # stage -> position of its last REDUCE_GRAD
    new: dict[int, int] = {}  # stage -> position of its last gradient that is not yet reduced
    for position, action in enumerate(row):
        stage, op, _ = action
        if op == Op.UNSHARD and unsharded[stage]:
            fault = f"follows another {action} with no {stage}RESHARD between: leave one out"
        elif op == Op.RESHARD and not unsharded[stage]:
            fault = f"has no {stage}UNSHARD before it: add one, or leave it out"
        elif op == Op.REDUCE_GRAD and Op.W not in owed[stage]:
            fault = f"has nothing to reduce, for stage {stage} owes no W: leave it out"
        elif op == Op.REDUCE_GRAD and stage not in new:
            before = f" after actions[{rank}][{last[stage]}]" if stage in last else ""
            fault = f"has nothing to reduce{before}: it must follow a W or B of the stage"
        elif op not in WHOLE_STAGE_OPS and not unsharded.get(stage, True):
            fault = (
                f"computes while stage {stage} is resharded: move {stage}UNSHARD before it, or "
                "leave out all UNSHARD and RESHARD of the stage"
            )
        else:
            if op in (Op.UNSHARD, Op.RESHARD):
                unsharded[stage] = op == Op.UNSHARD
            elif op == Op.REDUCE_GRAD:
                last[stage] = position
                del new[stage]
            elif op in (Op.B, Op.W) and stage in reduces:
                new[stage] = position
            continue
        raise ScheduleError(f"{action} (actions[{rank}][{position}], rank {rank}) {fault}")
    for stage, position in new.items():
        raise ScheduleError(
            f"{row[position]} (actions[{rank}][{position}], rank {rank}) comes after "
            f"{stage}REDUCE_GRAD (actions[{rank}][{last[stage]}]), which misses its gradient: move "
            f"{stage}REDUCE_GRAD behind the last W or B of the stage, or add another there"
        )


def _check_updates(schedule: Schedule, owed: Owed) -> None:
    """Check that every stage that owes W has one UPDATE, behind all of its gradients."""
    if not schedule.has_updates:
        return
    missing = {stage for stage, ops in enumerate(owed) if Op.W in ops}
    for rank, row in enumerate(schedule.actions):
        place: dict[int, int] = {}  # stage -> position of its UPDATE
        for position, action in enumerate(row):
            stage, op, _ = action
            where = f"{action} (actions[{rank}][{position}], rank {rank})"
            before = f"{stage}UPDATE (actions[{rank}][{place.get(stage)}])"
            if op == Op.UPDATE and Op.W not in owed[stage]:
                raise ScheduleError(
                    f"{where} has nothing to update, for stage {stage} owes no W: leave it out"
                )
            if op == Op.UPDATE and stage in place:
                raise ScheduleError(f"{where} repeats {before}: leave one out")
            if op == Op.UPDATE:
                place[stage] = position
                missing.discard(stage)
            elif stage in place and op in (Op.W, Op.B, Op.REDUCE_GRAD):
                raise ScheduleError(
                    f"{where} comes after {before}, which misses its gradient: move "
                    f"{stage}UPDATE behind it"
                )
    if missing:
        stage = min(missing)
        raise ScheduleError(
            f"stage {stage} has no {stage}UPDATE, and other stages have theirs: add it on rank "
            f"{schedule.placement[stage]} behind the last gradient of the stage, or take "
            "schedule.updated()"
        )


def check_order(graph: Dependencies) -> None:
    """Raise if the rows deadlock: if ranks wait for each other in a circle.

    Raises:
        ScheduleError: names every action of the circle, its rank and the action that it waits for.
            A circle of one rank is an action that stands before one whose result it reads.

    Example:
        >>> check_order(dependencies([[Action.parse("0B0"), Action.parse("0F0")]]))
        Traceback (most recent call last):
        ...
        fpipe.errors.ScheduleError: rank 0 runs 0B0 (actions[0][0]) before 0F0 (actions[0][1]), \
whose result it reads: move 0F0 before it
    """
    ran = bytearray(len(graph.actions))
    for number in graph.run_order():
        ran[number] = 1
    if all(ran):
        return
    # Each stuck rank waits for an action of a stuck rank, so following them leads into a circle.
    stuck = next(number for number, done in enumerate(ran) if not done)
    seen: dict[int, int] = {}  # an action at which a rank is stuck -> the action it waits for
    while stuck not in seen:
        seen[stuck] = next(need for need in graph.needs[stuck] if not ran[need])
        rank, _ = graph.place(seen[stuck])
        stuck = ran.index(0, graph.starts[rank])
    raise ScheduleError(_circle(graph, list(seen.items())[list(seen).index(stuck) :]))


def _circle(graph: Dependencies, waits: Sequence[tuple[int, int]]) -> str:
    """The error for a circle of pairs: an action, and the action that it waits for."""

    def at(number: int) -> str:
        rank, position = graph.place(number)
        return f"{graph.actions[number]} (actions[{rank}][{position}])"

    if len(waits) == 1:
        action, need = waits[0]
        return (
            f"rank {graph.place(action)[0]} runs {at(action)} before {at(need)}, whose result it "
            f"reads: move {graph.actions[need]} before it"
        )
    steps = [
        f"rank {graph.place(action)[0]} stops at {at(action)}, which reads {at(need)}"
        for action, need in waits
    ]
    return (
        "the ranks wait for each other in a circle, so none can go on: "
        + "; ".join(steps)
        + ". Move one of the actions that are read before the one at which its rank stops"
    )


def owed_by_stage(requires: Requires | None, stages: int) -> Owed:
    """`requires` as one set of ops per stage.

    Raises:
        ScheduleError: `requires` is not a sequence with one entry per stage, an entry is not F
            with or without I and W, or a stage owes a gradient that no stage after it passes back.

    Example:
        >>> [" ".join(sorted(owed)) for owed in owed_by_stage(["F", "FW"], 2)]
        ['F', 'F W']
    """
    if requires is None:
        requires = "FIW"
    if isinstance(requires, str):
        requires = [requires] * stages
    if not isinstance(requires, Sequence):
        raise ScheduleError(
            f"requires={requires!r:.60} is {a_type(requires)}: give one entry per stage, "
            "such as 'FIW', or one string for them all"
        )
    if len(requires) != stages:
        raise ScheduleError(
            f"requires has {len(requires)} entries and the schedule {stages} stages: give one "
            "entry per stage, or one string for them all"
        )
    owed = tuple(_entry(stage, entry) for stage, entry in enumerate(requires))
    for stage in range(stages - 1):
        reader = stage + 1
        if len(owed[stage]) > 1 and Op.I not in owed[reader]:
            raise ScheduleError(
                f"requires[{stage}]={requires[stage]!r} owes a gradient, which comes from the "
                f"input gradient of stage {reader}, and requires[{reader}]="
                f"{requires[reader]!r} has no I: add it there, or owe F alone at stage {stage}"
            )
    return owed


def _entry(stage: int, entry: str | Collection[str]) -> frozenset[Op]:
    ops = list(entry) if isinstance(entry, Collection) else []
    if Op.F not in ops or not all(op in (Op.F, Op.I, Op.W) for op in ops):
        raise ScheduleError(
            f"requires[{stage}]={entry!r:.60} must be one of 'F', 'FI', 'FW' and 'FIW': forward, "
            "input gradient, weight gradient (B is I and W in one, so it is not owed as such)"
        )
    return frozenset(Op(op) for op in ops)
