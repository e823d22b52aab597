"""Schedules of forwards alone, for evaluation, and of all forwards first."""

from __future__ import annotations

from collections.abc import Sequence

from fpipe.schedule.action import Action, Op
from fpipe.schedule.arguments import plain_counts
from fpipe.schedule.placements import looped, stages_on
from fpipe.schedule.schedule import Schedule


def forward_only(
    *,
    ranks: int,
    microbatches: int,
    stages_per_rank: int = 1,
    placement: Sequence[int] | None = None,
) -> Schedule:
    """Forward only: evaluation, on whatever placement the training has.

    A rank runs a forward as soon as its input is there, and of several the one of its last stage.
    So a microbatch leaves as soon as it can, and few are under way at a time. The greedy rule is
    our own. With f the time of a rank's whole forward of one microbatch, the bubble is (p−1)f/v on
    looped stages where p divides m, for every m where v = 1, and (p−1)f on the V.

    Args:
        ranks: p, 1 or more.
        microbatches: m, 1 or more.
        stages_per_rank: v, 1 or more; stage s is on rank s mod p.
        placement: the rank of each stage, in place of `stages_per_rank`, such as that of the
            schedule that trains: ``forward_only(..., placement=schedule.placement)``.

    Returns:
        A schedule of F actions. `fpipe.verify` takes it with ``requires="F"``.

    Raises:
        ScheduleError: an argument is not an integer or is less than 1, or the placement names a
            rank that does not exist.

    Example:
        >>> for row in forward_only(ranks=2, microbatches=2, stages_per_rank=2).actions:
        ...     print(*row)
        0F0 0F1 2F0 2F1
        1F0 1F1 3F0 3F1
    """
    ranks, microbatches, stages_per_rank = plain_counts(
        ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank
    )
    if placement is None:
        placement = looped(ranks, stages_per_rank)
    # Checks the placement before it is used; rows are filled in below.
    stages = Schedule(placement, [()] * ranks).placement
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    begun = [0] * len(stages)  # forwards that each stage has done
    while any(count < microbatches for count in begun):
        # One tick: every rank does one forward, of those whose input was there before the tick.
        there = [microbatches, *begun]
        busy: set[int] = set()
        for stage in reversed(range(len(stages))):
            rank = stages[stage]
            if rank not in busy and begun[stage] < there[stage]:
                rows[rank].append(Action(stage, Op.F, begun[stage]))
                begun[stage] += 1
                busy.add(rank)
    return Schedule(stages, rows, name="forward_only")


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
    backward = (Op.I, Op.W) if split else (Op.B,)
    numbers = range(microbatches)
    for rank in range(ranks or max(placement) + 1):
        stages = stages_on(placement, rank)
        row = [Action(stage, Op.F, m) for stage in stages for m in numbers]
        row += [
            Action(stage, op, m) for stage in reversed(stages) for m in numbers for op in backward
        ]
        rows.append(row)
    return Schedule(placement, rows, name="all forwards first")
