"""Schedules whose stages go down the ranks and up again: ZB-V and DualPipeV."""

from __future__ import annotations

from fpipe.schedule.action import Op
from fpipe.schedule.arguments import plain_counts
from fpipe.schedule.families.rows import Word, numbered
from fpipe.schedule.placements import vee
from fpipe.schedule.schedule import Schedule


def zbv(*, ranks: int, microbatches: int) -> Schedule:
    """ZB-V: the stages go down the ranks and up again, and no rank waits between first and last.

    Source: Qi et al., https://arxiv.org/abs/2405.15362; the order is that of torch's ZBVZeroBubble.

    Each rank holds two stages, one of the way down and one of the way up, so rank 0 has both the
    input and the loss. With the times of F, I and W equal (f of a rank's two stages together) and
    m ≥ 2p−1, no rank waits between its first and its last action and the bubble is (p−1)f/2. A
    rank holds min(p, m) microbatches at its peak, counting a stage's as one half.

    Args:
        ranks: p, 1 or more; two stages per rank, s and 2p−1−s.
        microbatches: m, 1 or more. Built for 2p−1 or more; fewer run in the order of 2p−1 with the
            rest left out, so a rank then waits for a while.

    Returns:
        A schedule of F, I and W actions.

    Raises:
        ScheduleError: an argument is not an integer or is less than 1.

    Example:
        >>> for row in zbv(ranks=2, microbatches=3).actions:
        ...     print(*row)
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    ranks, microbatches = plain_counts(ranks=ranks, microbatches=microbatches)
    enough = max(microbatches, 2 * ranks - 1)
    rows = (numbered(_zbv_row(rank, ranks, enough), microbatches) for rank in range(ranks))
    return Schedule(vee(ranks), rows, name="zbv")


def _zbv_row(rank: int, ranks: int, microbatches: int) -> list[Word]:
    down, up = rank, 2 * ranks - 1 - rank
    f_down, i_down, w_down = (down, Op.F), (down, Op.I), (down, Op.W)
    f_up, i_up, w_up = (up, Op.F), (up, Op.I), (up, Op.W)
    below = ranks - 1 - rank  # ranks further down the V
    return [
        # Fill: forwards go down, and come up again after the 2 * below stages further on.
        *[f_down] * (2 * below + 1),
        *[f_up, f_down] * rank,
        *[f_up, i_up, w_up] * (below + 1),
        # Steady: both stages do the whole of a microbatch. The last turns have no forward to begin.
        *[f_down, i_down, w_down, f_up, i_up, w_up] * (microbatches - 2 * ranks + 1 + rank),
        *[i_down, w_down, f_up, i_up, w_up] * below,
        # Drain: input gradients first, for other ranks wait for them.
        *[i_down, i_up] * rank,
        *[i_down, w_down] * (below + 1),
        *[w_up] * rank,
        *[w_down] * rank,
    ]


def dualpipev(*, ranks: int, microbatches: int) -> Schedule:
    """DualPipeV: on the V, a forward and a full backward side by side through the steady state.

    Source: DeepSeek-AI, https://github.com/deepseek-ai/DualPipe, the V form of DualPipe,
    https://arxiv.org/abs/2412.19437.

    In the steady state a rank runs the forward of one of its stages together with the full backward
    of the other, so that the communication inside the one (experts, tensor parallelism) hides
    behind the compute of the other. Here such a pair is two actions, F then B. Backwards are split
    into I and W only where a rank would wait. The fullest rank holds min(p + ½, m) microbatches at
    its peak, counting a stage's as one half. Where such a pair runs together in a time F&B
    (`Cost.pair`), with F, B and W the times of one stage, the bubble is (p−1)(F&B+B−3W) for m ≥ 4p
    and F&B at least 0.7 (F+B). Where the two run one after the other it has no closed form that we
    know.

    Args:
        ranks: p, 1 or more; two stages per rank, s and 2p−1−s.
        microbatches: m, 1 or more. Built for 2p or more; fewer run in the order of 2p with the
            rest left out.

    Returns:
        A schedule of F, B, I and W actions.

    Raises:
        ScheduleError: an argument is not an integer or is less than 1.

    Example:
        >>> for row in dualpipev(ranks=2, microbatches=4).actions:
        ...     print(*row)
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
        1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
    """
    ranks, microbatches = plain_counts(ranks=ranks, microbatches=microbatches)
    enough = max(microbatches, 2 * ranks)
    rows = (numbered(_dualpipev_row(rank, ranks, enough), microbatches) for rank in range(ranks))
    return Schedule(vee(ranks), rows, name="dualpipev")


def _dualpipev_row(rank: int, ranks: int, microbatches: int) -> list[Word]:
    down, up = rank, 2 * ranks - 1 - rank
    f_down, b_down, i_down = (down, Op.F), (down, Op.B), (down, Op.I)
    f_up, b_up, i_up, w_up = (up, Op.F), (up, Op.B), (up, Op.I), (up, Op.W)
    below = ranks - 1 - rank  # ranks further down the V
    # The last backwards alternate. The second half of them is split, and its W's come at the end,
    # oldest first, together with those of the input gradients that are still to come up.
    last = [b_up, b_down] * (rank + 1)
    late = [(stage, Op.I) for stage, _ in last[rank + 1 :]]
    owed = [(stage, Op.W) for stage, _ in [*late, *[i_down] * below]]
    return [
        # Fill.
        *[f_down] * (2 * below),
        *[f_down, f_up] * (rank + 1),
        *[i_up, w_up, f_up] * below,
        # Steady: a forward on one stage beside a backward on the other.
        *[f_down, b_up, f_up, b_down] * (microbatches - 2 * ranks + rank + 1),
        *[b_up, f_up, b_down] * below,
        # Drain.
        *last[: rank + 1],
        *late,
        *(word for weight in owed[:below] for word in (weight, i_down)),
        *owed[below:],
    ]
