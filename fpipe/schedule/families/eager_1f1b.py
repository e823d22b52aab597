"""Eager 1F1B: 1F1B that runs twice as far ahead, to hide the latency between ranks."""

from __future__ import annotations

from fpipe.schedule.arguments import plain_counts
from fpipe.schedule.families.row import full, numbered, weave
from fpipe.schedule.placements import linear
from fpipe.schedule.schedule import Schedule


def eager_1f1b(*, ranks: int, microbatches: int) -> Schedule:
    """Eager 1F1B (AlpaComm, https://arxiv.org/abs/2211.05322; also in JaxPP).

    As `one_f_one_b`, but rank r runs 2(p−1−r) forwards ahead, so that a message has a whole turn
    to travel. The bubble without latency is the same (p−1)(f+b); rank 0 holds min(2p−1, m)
    microbatches at its peak. Both hold for every p and m.

    Args:
        ranks: p, 1 or more; one stage per rank, stage s on rank s.
        microbatches: m, 1 or more.

    Returns:
        A schedule of F and B actions.

    Raises:
        ScheduleError: an argument is no integer or is less than 1.

    Example:
        >>> for row in eager_1f1b(ranks=2, microbatches=3).actions:
        ...     print(*row)
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    ranks, microbatches = plain_counts(ranks=ranks, microbatches=microbatches)
    rows = []
    for rank in range(ranks):
        stages = [rank] * microbatches
        words = weave(stages, full(stages), warmup=2 * (ranks - 1 - rank))
        rows.append(numbered(words, microbatches))
    return Schedule(linear(ranks), rows, name="eager_1f1b")
