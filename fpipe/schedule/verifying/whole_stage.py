"""The rules of the actions that take a whole stage: UNSHARD, RESHARD and REDUCE_GRAD."""

from __future__ import annotations

from collections.abc import Sequence

from fpipe.errors import ScheduleError
from fpipe.schedule.action import WHOLE_STAGE_OPS, Action, Op
from fpipe.schedule.verifying.requires import Owed


def check_whole_stage(rank: int, row: Sequence[Action], owed: Owed) -> None:
    """Check the whole-stage actions of a rank's row, whose actions are well formed.

    Args:
        rank: number of the rank, for the error text.
        row: its actions, in order.
        owed: per stage, what the schedule owes.

    Raises:
        ScheduleError: UNSHARD and RESHARD of a stage do not alternate, a stage that has any
            computes while it is not unsharded, or REDUCE_GRAD comes twice, before the last W or B
            of its stage, or where no W is owed.

    Example:
        >>> row = [Action.parse(text) for text in "0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD".split()]
        >>> check_whole_stage(0, row, (frozenset("FIW"),))
    """
    whole = [action for action in row if action.op in WHOLE_STAGE_OPS]
    if not whole:
        return
    unsharded = {stage: False for stage, op, _ in whole if op != Op.REDUCE_GRAD}
    reduced: dict[int, int] = {}  # stage -> position of its REDUCE_GRAD
    for position, action in enumerate(row):
        stage, op, _ = action
        if op == Op.UNSHARD and unsharded[stage]:
            fault = f"follows another {action} with no {stage}RESHARD between: leave one out"
        elif op == Op.RESHARD and not unsharded[stage]:
            fault = f"has no {stage}UNSHARD before it: add one, or leave it out"
        elif op == Op.REDUCE_GRAD and stage in reduced:
            fault = f"repeats actions[{rank}][{reduced[stage]}]: gradients are reduced once"
        elif op == Op.REDUCE_GRAD and Op.W not in owed[stage]:
            fault = f"has nothing to reduce, for stage {stage} owes no W: leave it out"
        elif op in (Op.B, Op.W) and stage in reduced:
            fault = (
                f"comes after {stage}REDUCE_GRAD (actions[{rank}][{reduced[stage]}]), which would "
                f"miss its gradient: move {stage}REDUCE_GRAD behind the last W or B of the stage"
            )
        elif op not in WHOLE_STAGE_OPS and not unsharded.get(stage, True):
            fault = (
                f"computes while stage {stage} is resharded: move {stage}UNSHARD before it, or "
                "leave out all UNSHARD and RESHARD of the stage"
            )
        else:
            if op in (Op.UNSHARD, Op.RESHARD):
                unsharded[stage] = op == Op.UNSHARD
            elif op == Op.REDUCE_GRAD:
                reduced[stage] = position
            continue
        raise ScheduleError(f"{action} (actions[{rank}][{position}], rank {rank}) {fault}")
