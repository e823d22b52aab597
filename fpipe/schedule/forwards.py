"""The forwards of a schedule without its backwards; or before them, on any placement."""

from __future__ import annotations

from collections.abc import Sequence

from fpipe.schedule.action import Action, Op
from fpipe.schedule.placements import stages_on
from fpipe.schedule.schedule import Schedule


def forwards_of(schedule: Schedule) -> Schedule:
    """The forwards of a schedule alone, in their order: a schedule for evaluation."""
    rows = [[action for action in row if action.op == Op.F] for row in schedule.actions]
    return Schedule(schedule.placement, rows, name=f"{schedule.name} (forward only)")


def all_forwards_first(
    placement: Sequence[int], microbatches: int, split: bool, ranks: int | None = None
) -> Schedule:
    """GPipe's order on any placement, with whole or split backwards.

    The last of the `ranks` may have no stage; None for as many as the placement names.
    """
    rows = []
    for rank in range(ranks or max(placement) + 1):
        own = stages_on(placement, rank)
        numbers = range(microbatches)
        row = [Action(stage, Op.F, m) for stage in own for m in numbers]
        for stage in reversed(own):
            for m in numbers:
                ops = (Op.I, Op.W) if split else (Op.B,)
                row += [Action(stage, op, m) for op in ops]
        rows.append(row)
    return Schedule(placement, rows, name="all forwards first")
