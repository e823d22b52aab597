"""Interleaved 1F1B: several stages per rank, which divide the bubble by their number."""

from __future__ import annotations

from fpipe.schedule.arguments import plain_counts
from fpipe.schedule.families.row import full, numbered, round_size, rounds, weave
from fpipe.schedule.placements import looped
from fpipe.schedule.schedule import Schedule


def interleaved_1f1b(*, ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., https://arxiv.org/abs/2104.04473), with flexible rounds.

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
        ScheduleError: an argument is no integer or is less than 1, or m is not such a multiple.

    Example:
        >>> for row in interleaved_1f1b(ranks=2, microbatches=2, stages_per_rank=2).actions:
        ...     print(*row)
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    ranks, microbatches, stages_per_rank = plain_counts(
        ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank
    )
    size = round_size(ranks=ranks, microbatches=microbatches)
    placement = looped(ranks, stages_per_rank)
    rows = []
    for rank in range(ranks):
        stages = range(rank, len(placement), ranks)
        words = weave(
            rounds(stages, size, microbatches),
            full(rounds(stages[::-1], size, microbatches)),
            warmup=(stages_per_rank - 1) * size + 2 * (ranks - 1 - rank),
        )
        rows.append(numbered(words, microbatches))
    return Schedule(placement, rows, name="interleaved_1f1b")
