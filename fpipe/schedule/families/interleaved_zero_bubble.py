"""Interleaved zero bubble: several stages per rank, and weight gradients that fill the bubble."""

from __future__ import annotations

from fpipe.schedule.arguments import plain_counts
from fpipe.schedule.families.row import numbered, round_size, rounds, split, weave
from fpipe.schedule.placements import looped
from fpipe.schedule.schedule import Schedule


def interleaved_zero_bubble(*, ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """ZB1P of https://arxiv.org/abs/2401.10241 on looped stages, as torch's InterleavedZeroBubble.

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
        ScheduleError: an argument is no integer or is less than 1, or m is not such a multiple.

    Example:
        >>> for row in interleaved_zero_bubble(ranks=2, microbatches=2, stages_per_rank=2).actions:
        ...     print(*row)
        0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
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
            split(rounds(stages[::-1], size, microbatches), lag=rank),
            warmup=(stages_per_rank - 1) * size + ranks - 1 - rank,
        )
        rows.append(numbered(words, microbatches))
    return Schedule(placement, rows, name="interleaved_zero_bubble")
