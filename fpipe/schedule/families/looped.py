"""Schedules whose stages go round the ranks: looped BFS, interleaved and grouped 1F1B."""

from __future__ import annotations

from fpipe.errors import ScheduleError
from fpipe.schedule.action import Action, Op
from fpipe.schedule.arguments import plain_counts
from fpipe.schedule.families.rows import equal_rounds, one_forward_one_backward
from fpipe.schedule.placements import looped
from fpipe.schedule.schedule import Schedule


def looped_bfs(*, ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Looped BFS: several stages per rank, each of which takes all microbatches at once.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, https://arxiv.org/abs/2211.05953.

    A rank runs all microbatches through a stage before it turns to its next: what a rank gathers
    or reduces per stage (sharded parameters, gradients) is done once. With f, b the time of a
    rank's whole forward and backward of one microbatch, the bubble is (p−1)(f+b)/v where m ≥ p,
    and (v−1)(p−m)(f+b)/v more where m < p; a rank holds all m microbatches at its peak. The
    backward takes the microbatches last first, so the newest activation is the first to be freed.

    Args:
        ranks: p, 1 or more.
        microbatches: m, 1 or more.
        stages_per_rank: v, 1 or more; stage s is on rank s mod p.

    Returns:
        A schedule of F and B actions.

    Raises:
        ScheduleError: an argument is not an integer or is less than 1.

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
        forwards = [Action(stage, Op.F, m) for stage in stages for m in range(microbatches)]
        backwards = [Action(a.stage, Op.B, a.microbatch) for a in reversed(forwards)]
        rows.append(forwards + backwards)
    return Schedule(placement, rows, name="looped_bfs")


def interleaved_1f1b(*, ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Interleaved 1F1B: several stages per rank, which divide the bubble by their number.

    Source: Narayanan et al., https://arxiv.org/abs/2104.04473, with flexible rounds.

    A rank's stages take turns of g = m / rounds microbatches, rounds = max(1, m // p): "depth
    first". With f, b the time of a rank's whole forward and backward of one microbatch, the bubble
    is (p−1)(f+b)/v where m ≥ p, and (v−1)(p−m)(f+b)/v more where m < p. At its peak, rank 0 holds
    min(m, ((v−1)g + 2(p−1) + 1)/v) microbatches, counting a stage's as 1/v.

    Args:
        ranks: p, 1 or more.
        microbatches: m; a multiple of max(1, m // p). So every m ≤ 2p−1 does, and every multiple
            of p.
        stages_per_rank: v, 1 or more; stage s is on rank s mod p. With one it is `eager_1f1b`.

    Returns:
        A schedule of F and B actions.

    Raises:
        ScheduleError: an argument is not an integer or is less than 1, or m is no such multiple.

    Example:
        >>> for row in interleaved_1f1b(ranks=2, microbatches=2, stages_per_rank=2).actions:
        ...     print(*row)
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    ranks, microbatches, stages_per_rank = plain_counts(
        ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank
    )
    return one_forward_one_backward(
        "interleaved_1f1b",
        ranks=ranks,
        microbatches=microbatches,
        stages_per_rank=stages_per_rank,
        round_size=equal_rounds(ranks=ranks, microbatches=microbatches),
        ahead=2,
    )


def interleaved_zero_bubble(*, ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Interleaved zero bubble: several stages per rank, and weight gradients that fill the bubble.

    Source: ZB1P of https://arxiv.org/abs/2401.10241, on looped stages as torch's
    InterleavedZeroBubble.

    The stages of a rank take turns as in `interleaved_1f1b`, with p−1−r forwards ahead (and a
    round for each further stage); rank r holds back r weight gradients. With f, i, w the times of a
    rank's whole F, I and W of one microbatch, the bubble is (p−1)(f+i−w)/v, where m ≥ p and w is no
    longer than f or i. With rounds of g = m / max(1, m // p), a rank holds min(m, ((v−1)g + p)/v)
    microbatches at its peak, counting a stage's as 1/v: p where p divides m.

    Args:
        ranks: p, 1 or more.
        microbatches: m; a multiple of max(1, m // p).
        stages_per_rank: v, 1 or more; stage s is on rank s mod p. With one it is `zb_h1`.

    Returns:
        A schedule of F, I and W actions.

    Raises:
        ScheduleError: an argument is not an integer or is less than 1, or m is no such multiple.

    Example:
        >>> for row in interleaved_zero_bubble(ranks=2, microbatches=2, stages_per_rank=2).actions:
        ...     print(*row)
        0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    ranks, microbatches, stages_per_rank = plain_counts(
        ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank
    )
    return one_forward_one_backward(
        "interleaved_zero_bubble",
        ranks=ranks,
        microbatches=microbatches,
        stages_per_rank=stages_per_rank,
        round_size=equal_rounds(ranks=ranks, microbatches=microbatches),
        ahead=1,
        lag=1,
    )


def group_1f1b(
    *, ranks: int, microbatches: int, stages_per_rank: int = 2, group: int | None = None
) -> Schedule:
    """Group 1F1B: interleaved stages whose rounds are shorter than the pipeline, to save memory.

    Source: Wan et al., PipeOffload, https://arxiv.org/abs/2503.01328.

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
        ScheduleError: an argument is not an integer or is less than 1, or g is less than p//2 or
            does not divide m.

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
    return one_forward_one_backward(
        "group_1f1b",
        ranks=ranks,
        microbatches=microbatches,
        stages_per_rank=stages_per_rank,
        round_size=size,
        ahead=1,
        lag=0,
    )


def group_size(*, ranks: int, microbatches: int) -> int:
    """The default group of `group_1f1b`.

    Example:
        >>> group_size(ranks=4, microbatches=6), group_size(ranks=4, microbatches=7)
        (3, 7)
    """
    divisors = [size for size in range(1, microbatches + 1) if microbatches % size == 0]
    fitting = [size for size in divisors if ranks // 2 <= size <= ranks]
    return (
        max(fitting) if fitting else min((s for s in divisors if s > ranks), default=divisors[-1])
    )
