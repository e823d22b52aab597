"""Looped BFS: several stages per rank, each of which takes all microbatches at once."""

from __future__ import annotations

from fpipe.schedule.action import Action, Op
from fpipe.schedule.arguments import plain_counts
from fpipe.schedule.placements import looped
from fpipe.schedule.schedule import Schedule


def looped_bfs(*, ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Breadth-first pipeline (Lamy-Poirier, https://arxiv.org/abs/2211.05953).

    A rank runs all microbatches through a stage before it turns to its next: what a rank gathers
    or reduces per stage (sharded parameters, gradients) is done once. With f, b the time of a
    rank's whole forward and backward of one microbatch, the bubble is (p−1)(f+b)/v where m ≥ p,
    and (v−1)(p−m)(f+b)/v more where m < p; a rank holds all m microbatches at its peak. The
    backward takes the microbatches last first, so the activation that was made last is the first
    to be freed.

    Args:
        ranks: p, 1 or more.
        microbatches: m, 1 or more.
        stages_per_rank: v, 1 or more; stage s is on rank s mod p.

    Returns:
        A schedule of F and B actions.

    Raises:
        ScheduleError: an argument is no integer or is less than 1.

    Example:
        >>> for row in looped_bfs(ranks=2, microbatches=2, stages_per_rank=2).actions:
        ...     print(*row)
        0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0
        1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0
    """
    ranks, microbatches, stages_per_rank = plain_counts(
        ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank
    )
    placement = looped(ranks, stages_per_rank)
    rows = []
    for rank in range(ranks):
        stages = range(rank, len(placement), ranks)
        order = range(microbatches)
        forwards = [Action(stage, Op.F, microbatch) for stage in stages for microbatch in order]
        backwards = [Action(a.stage, Op.B, a.microbatch) for a in reversed(forwards)]
        rows.append(forwards + backwards)
    return Schedule(placement, rows, name="looped_bfs")
