"""ZB-H1: 1F1B whose weight gradients fill the bubble, at the memory of 1F1B."""

from __future__ import annotations

from fpipe.schedule.arguments import plain_counts
from fpipe.schedule.families.row import numbered, split, weave
from fpipe.schedule.placements import linear
from fpipe.schedule.schedule import Schedule


def zb_h1(*, ranks: int, microbatches: int) -> Schedule:
    """ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, https://arxiv.org/abs/2401.10241).

    Forwards and input gradients go as in `one_f_one_b`; rank r holds back r weight gradients, which
    is the memory that 1F1B leaves free there, and runs them while it would wait. With f, i, w the
    times of F, I and W, the bubble is (p−1)(f+i−w), where m ≥ p and w is no longer than f or i. A
    rank holds min(p, m) microbatches at its peak.

    Args:
        ranks: p, 1 or more; one stage per rank, stage s on rank s.
        microbatches: m, 1 or more.

    Returns:
        A schedule of F, I and W actions.

    Raises:
        ScheduleError: an argument is no integer or is less than 1.

    Example:
        >>> for row in zb_h1(ranks=2, microbatches=3).actions:
        ...     print(*row)
        0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    ranks, microbatches = plain_counts(ranks=ranks, microbatches=microbatches)
    rows = []
    for rank in range(ranks):
        stages = [rank] * microbatches
        words = weave(stages, split(stages, lag=rank), warmup=ranks - 1 - rank)
        rows.append(numbered(words, microbatches))
    return Schedule(linear(ranks), rows, name="zb_h1")
