"""ZB-H2: no bubble between a rank's first and last action, at twice the memory of 1F1B."""

from __future__ import annotations

from fpipe.schedule.arguments import plain_counts
from fpipe.schedule.families.row import numbered, split, weave
from fpipe.schedule.placements import linear
from fpipe.schedule.schedule import Schedule


def zb_h2(*, ranks: int, microbatches: int) -> Schedule:
    """ZB-H2 (Qi et al., Zero Bubble Pipeline Parallelism, https://arxiv.org/abs/2401.10241).

    Rank r runs 2(p−1−r) forwards ahead and holds back 2r weight gradients, so that every rank is
    busy from its first action to its last. With f, i, w the times of F, I and W, the longest rank's
    own time (first start to last end) is longer than its work by max(0, (p−1)(f+i−2w)), where
    m ≥ 2p−1 and w is no longer than f or i. A rank holds min(2p−1, m) microbatches at its peak.
    With fewer microbatches it runs, without that promise.

    The ranks end one after the other, as they start, so a step that ends in a barrier (an
    optimizer that needs the norm of all gradients) sees the bubble again.

    Args:
        ranks: p, 1 or more; one stage per rank, stage s on rank s.
        microbatches: m, 1 or more; built for 2p−1 or more.

    Returns:
        A schedule of F, I and W actions.

    Raises:
        ScheduleError: an argument is no integer or is less than 1.

    Example:
        >>> for row in zb_h2(ranks=2, microbatches=3).actions:
        ...     print(*row)
        0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
    """
    ranks, microbatches = plain_counts(ranks=ranks, microbatches=microbatches)
    rows = []
    for rank in range(ranks):
        stages = [rank] * microbatches
        words = weave(stages, split(stages, lag=2 * rank), warmup=2 * (ranks - 1 - rank))
        rows.append(numbered(words, microbatches))
    return Schedule(linear(ranks), rows, name="zb_h2")
