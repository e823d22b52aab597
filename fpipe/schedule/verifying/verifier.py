"""Prove that a schedule is whole and can run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import cache

from fpipe.errors import ScheduleError, a_type
from fpipe.schedule.action import COMPUTE_OPS, WHOLE_STAGE_OPS, Action, Op
from fpipe.schedule.dependencies import chain, dependencies
from fpipe.schedule.schedule import Schedule
from fpipe.schedule.verifying.deadlock import check_order
from fpipe.schedule.verifying.requires import LEGAL, Owed, Requires, owed_by_stage
from fpipe.schedule.verifying.whole_stage import check_whole_stage


def verify(schedule: Schedule, requires: Requires | None = None) -> None:
    """Prove that a schedule does all that it owes, each action once, in an order that can run.

    Every stage takes the microbatches 0 to m−1, where m−1 is the greatest that is named. On each of
    them it owes a forward and, as `requires` says, its gradients, all on the rank that the
    placement names. The order must let every rank run its row from left to right, where F of a
    stage reads F of the stage before, B and I read F of their stage and B or I of the stage after,
    and W reads I (or, where a stage has none, what I would read). Sends never block and a message
    that comes early is kept, so a schedule can run if and only if no ranks wait for each other in
    a circle.

    UNSHARD and RESHARD of a stage must alternate, UNSHARD first; a stage that has any computes only
    while it is unsharded. REDUCE_GRAD of a stage comes at most once, after its last W or B.

    The time is linear in the number of actions: some microseconds for each.

    Args:
        schedule: any schedule, made by a family or by hand. SEND_* and RECV_* have no place in it:
            they are inserted when it is lowered.
        requires: per stage, which of F, I (input gradient) and W (weight gradient) are owed: one of
            "F", "FI", "FW", "FIW", or the same as a set of ops; or one string for all stages. None
            owes all three everywhere. What may stand for it:

            - "FIW": F, then B, or I and W.
            - "FI" (frozen, with trained stages before it): F, then I or B.
            - "FW" (the first trained stage): F, then W, or B, or I and W. Its I sends nothing; it
              does the part of the backward that does not wait for memory.
            - "F" (frozen, nothing before it is trained; or inference): F alone.

            B is thus "the whole backward of what the stage owes", and the same schedule serves a
            model with more or fewer trained parameters.

    Raises:
        ScheduleError: `schedule` is none, or a rule is broken. The text names the action, its rank,
            its place in `schedule.actions` and the rule; for ranks that wait for each other, all of
            them.

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
    reads = chain(schedule.num_stages)
    owed = owed_by_stage(requires, reads)
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            if fault := _fault(action, rank, schedule.placement):
                raise ScheduleError(f"{action} (actions[{rank}][{position}]) {fault}")
    _check_work(schedule, owed)
    for rank, row in enumerate(schedule.actions):
        check_whole_stage(rank, row, owed)
    check_order(dependencies(schedule.actions, reads))


def check_schedule(schedule: object) -> None:
    """Refuse what is no `Schedule`.

    Raises:
        ScheduleError: says how one is made.
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"schedule={schedule!r:.60} is {a_type(schedule)}: it must be a "
            "fpipe.Schedule, such as fpipe.schedules.zbv(ranks=2, microbatches=4)"
        )


def _fault(action: Action, rank: int, placement: Sequence[int]) -> str | None:
    """What is wrong with an action by itself, as the end of a sentence."""
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
    """Each stage does on each microbatch what it owes: no less, no more, nothing twice."""
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
            # Only what can still become legal goes on, so the last loop has to look for gaps alone.
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
    """Why an action is one too many, as the end of a sentence."""
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
