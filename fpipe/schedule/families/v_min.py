"""V-Min: a third of the memory of 1F1B, on the V."""

from __future__ import annotations

from fpipe.schedule.arguments import plain_counts
from fpipe.schedule.families.v_block import repeat_block
from fpipe.schedule.schedule import Schedule


def v_min(*, ranks: int, microbatches: int) -> Schedule:
    """V-Min (Qi et al., Pipeline Parallelism with Controllable Memory,
    https://arxiv.org/abs/2405.15362), built anew from the paper's building block.

    A microbatch moves on one rank in each slot, all the way down the V and up and back: the
    shortest life that an activation can have. A rank holds at most (p+4)//3 microbatches, counting
    a stage's as one half, for every p and m. With f the time of F of a rank's two stages, and I and
    W alike, the bubble is (2p − 5/2)f, or (2p − 2)f where 3 divides p, for p ≥ 2 and m ≥ p, and 0
    for p = 1. Where F, I and W differ, ranks wait in the steady state too.

    Args:
        ranks: p, 1 or more; two stages per rank, s and 2p−1−s.
        microbatches: m, 1 or more.

    Returns:
        A schedule of F, I and W actions.

    Raises:
        ScheduleError: an argument is no integer or is less than 1.

    Example:
        >>> for row in v_min(ranks=2, microbatches=2).actions:
        ...     print(*row)
        0F0 3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0I1 0W1
        1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 2W1 1W1
    """
    ranks, microbatches = plain_counts(ranks=ranks, microbatches=microbatches)
    # Without the two turns, F on the way down and I on the way down would meet in one slot.
    turns = (2, 0, 2) if ranks % 3 == 0 else (0, 0, 0)
    return repeat_block(
        ranks=ranks, microbatches=microbatches, hops=(1, 1, 1, 1), turns=turns, name="v_min"
    )
