"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from fpipe.schedule.action import Op
from fpipe.schedule.arguments import plain_counts
from fpipe.schedule.families.row import numbered
from fpipe.schedule.placements import linear
from fpipe.schedule.schedule import Schedule


def gpipe(*, ranks: int, microbatches: int) -> Schedule:
    """GPipe (Huang et al., https://arxiv.org/abs/1811.06965): all forwards, then all backwards.

    With p ranks, m microbatches and f, b the time of a forward and a backward, the bubble is
    (p−1)(f+b) and a rank holds m microbatches at its peak, for every p and m.

    Args:
        ranks: p, 1 or more; one stage per rank, stage s on rank s.
        microbatches: m, 1 or more.

    Returns:
        A schedule of F and B actions.

    Raises:
        ScheduleError: an argument is no integer or is less than 1.

    Example:
        >>> for row in gpipe(ranks=2, microbatches=2).actions:
        ...     print(*row)
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
    """
    ranks, microbatches = plain_counts(ranks=ranks, microbatches=microbatches)
    rows = (
        numbered([(rank, Op.F)] * microbatches + [(rank, Op.B)] * microbatches, microbatches)
        for rank in range(ranks)
    )
    return Schedule(linear(ranks), rows, name="gpipe")
