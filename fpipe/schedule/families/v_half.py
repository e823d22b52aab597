"""V-Half: half the memory of 1F1B, on the V."""

from __future__ import annotations

from fpipe.schedule.arguments import plain_counts
from fpipe.schedule.families.v_block import repeat_block
from fpipe.schedule.schedule import Schedule


def v_half(*, ranks: int, microbatches: int) -> Schedule:
    """V-Half (Qi et al., Pipeline Parallelism with Controllable Memory,
    https://arxiv.org/abs/2405.15362), built anew from the paper's building block.

    A microbatch takes two slots from rank to rank down the V and one up, forward and backward. A
    rank holds at most (p+2)//2 microbatches, counting a stage's as one half, for every p and m.
    With f the time of F of a rank's two stages, and I and W alike, the bubble is (7p − 6)f/4 for
    even p, (7p − 9)f/4 for odd p ≥ 3 and 0 for p = 1, where m ≥ p. Where F, I and W differ, ranks
    wait in the steady state too, but less than in `v_min`.

    Args:
        ranks: p, 1 or more; two stages per rank, s and 2p−1−s.
        microbatches: m, 1 or more.

    Returns:
        A schedule of F, I and W actions.

    Raises:
        ScheduleError: an argument is no integer or is less than 1.

    Example:
        >>> for row in v_half(ranks=3, microbatches=1).actions:
        ...     print(*row)
        0F0 5F0 5I0 5W0 0I0 0W0
        1F0 4F0 4I0 4W0 1I0 1W0
        2F0 3F0 3I0 2I0 3W0 2W0
    """
    ranks, microbatches = plain_counts(ranks=ranks, microbatches=microbatches)
    # The least slots lost at the turns for which no rank has two actions in one slot.
    turns = (1, 0, 0) if ranks % 2 else (1, 3, 0)
    return repeat_block(
        ranks=ranks, microbatches=microbatches, hops=(2, 1, 2, 1), turns=turns, name="v_half"
    )
