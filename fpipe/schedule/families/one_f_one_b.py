"""1F1B: one forward, one backward, so that a rank holds no more than p microbatches."""

from __future__ import annotations

from fpipe.schedule.arguments import plain_counts
from fpipe.schedule.families.row import full, numbered, weave
from fpipe.schedule.placements import linear
from fpipe.schedule.schedule import Schedule


def one_f_one_b(*, ranks: int, microbatches: int) -> Schedule:
    """1F1B (PipeDream-Flush, https://arxiv.org/abs/2006.09503; the default of Megatron-LM).

    Rank r runs p−1−r forwards ahead, then one forward and one backward in turn. With f, b the time
    of a forward and a backward, the bubble is (p−1)(f+b) and rank 0, the fullest, holds min(p, m)
    microbatches at its peak, for every p and m (also m < p). Every round trip between neighbours
    is in the critical path, so latency costs more here than in `eager_1f1b`.

    Args:
        ranks: p, 1 or more; one stage per rank, stage s on rank s.
        microbatches: m, 1 or more.

    Returns:
        A schedule of F and B actions.

    Raises:
        ScheduleError: an argument is no integer or is less than 1.

    Example:
        >>> for row in one_f_one_b(ranks=2, microbatches=3).actions:
        ...     print(*row)
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    ranks, microbatches = plain_counts(ranks=ranks, microbatches=microbatches)
    rows = []
    for rank in range(ranks):
        stages = [rank] * microbatches
        words = weave(stages, full(stages), warmup=ranks - 1 - rank)
        rows.append(numbered(words, microbatches))
    return Schedule(linear(ranks), rows, name="one_f_one_b")
