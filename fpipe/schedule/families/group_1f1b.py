"""Group 1F1B: interleaved stages whose rounds are shorter than the pipeline, to save memory."""

from __future__ import annotations

from fpipe.errors import ScheduleError
from fpipe.schedule.arguments import plain_counts
from fpipe.schedule.families.row import numbered, rounds, split, weave
from fpipe.schedule.placements import looped
from fpipe.schedule.schedule import Schedule


def group_1f1b(
    *, ranks: int, microbatches: int, stages_per_rank: int = 2, group: int | None = None
) -> Schedule:
    """Interleaved 1F1B in groups of g microbatches (Wan et al., PipeOffload,
    https://arxiv.org/abs/2503.01328).

    A rank's stages take turns of g microbatches; rank r runs (v−1)g + p−1−r forwards ahead, then F,
    I and W in turn. A rank holds at most ((v−1)g + p)/v microbatches, and at most m, counting a
    stage's as 1/v: p with g = p, and p(v+1)/2v with g = p/2. With f and i the times of a rank's
    whole F and I of one microbatch, the bubble with g = p is (p−1)(f+i)/v. With a smaller group, a
    rank waits in every group for the one before it to come round; with less than half of the ranks
    they would wait for each other for ever.

    Args:
        ranks: p, 1 or more.
        microbatches: m, a multiple of g.
        stages_per_rank: v, 1 or more; stage s is on rank s mod p.
        group: g, from p//2 to m; None for the greatest divisor of m from p//2 to p, or the least
            above p where there is none.

    Returns:
        A schedule of F, I and W actions.

    Raises:
        ScheduleError: an argument is no integer or is less than 1, or g is less than
            p//2 or does not divide m.

    Example:
        >>> for row in group_1f1b(ranks=2, microbatches=2, group=1).actions:
        ...     print(*row)
        0F0 2F0 0F1 2I0 2W0 2F1 0I0 0W0 2I1 2W1 0I1 0W1
        1F0 3F0 3I0 3W0 1F1 1I0 1W0 3F1 3I1 3W1 1I1 1W1
    """
    ranks, microbatches, stages_per_rank = plain_counts(
        ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank
    )
    size = group_size(ranks=ranks, microbatches=microbatches) if group is None else group
    (size,) = plain_counts(group=size)
    if microbatches % size:
        raise ScheduleError(
            f"microbatches={microbatches} must be a multiple of group={size}: take "
            f"{-(-microbatches // size) * size} microbatches or a group that divides them"
        )
    if size < min(microbatches, ranks // 2):
        raise ScheduleError(
            f"group={size} must be at least ranks // 2 = {ranks // 2}: with smaller groups the "
            "ranks would wait for each other in a circle"
        )
    placement = looped(ranks, stages_per_rank)
    rows = []
    for rank in range(ranks):
        stages = range(rank, len(placement), ranks)
        words = weave(
            rounds(stages, size, microbatches),
            split(rounds(stages[::-1], size, microbatches), lag=0),
            warmup=(stages_per_rank - 1) * size + ranks - 1 - rank,
        )
        rows.append(numbered(words, microbatches))
    return Schedule(placement, rows, name="group_1f1b")


def group_size(*, ranks: int, microbatches: int) -> int:
    """The group that `group_1f1b` takes where none is told.

    Example:
        >>> group_size(ranks=4, microbatches=6), group_size(ranks=4, microbatches=7)
        (3, 7)
    """
    divisors = [size for size in range(1, microbatches + 1) if microbatches % size == 0]
    fitting = [size for size in divisors if ranks // 2 <= size <= ranks]
    return (
        max(fitting) if fitting else min((s for s in divisors if s > ranks), default=divisors[-1])
    )
