"""Schedules with one stage per rank: GPipe, 1F1B, Eager 1F1B, ZB-H1 and ZB-H2."""

from __future__ import annotations

from fpipe.schedule.action import Op
from fpipe.schedule.arguments import plain_counts
from fpipe.schedule.families.rows import numbered, one_forward_one_backward
from fpipe.schedule.placements import linear
from fpipe.schedule.schedule import Schedule


def gpipe(*, ranks: int, microbatches: int) -> Schedule:
    """GPipe: all forwards, then all backwards.

    Source: Huang et al., https://arxiv.org/abs/1811.06965.

    With p ranks, m microbatches and f, b the time of a forward and a backward, the bubble is
    (p−1)(f+b) and a rank holds m microbatches at its peak, for every p and m.

    Args:
        ranks: p, 1 or more; one stage per rank, stage s on rank s.
        microbatches: m, 1 or more.

    Returns:
        A schedule of F and B actions.

    Raises:
        ScheduleError: an argument is not an integer or is less than 1.

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


def one_f_one_b(*, ranks: int, microbatches: int) -> Schedule:
    """1F1B: one forward, one backward, so that a rank holds no more than p microbatches.

    Source: PipeDream-Flush, https://arxiv.org/abs/2006.09503; the default of Megatron-LM.

    Rank r runs p−1−r forwards ahead, then one forward and one backward in turn. With f, b the time
    of a forward and a backward, the bubble is (p−1)(f+b) and rank 0, the fullest, holds min(p, m)
    microbatches at its peak, for every p and m (also m < p). Every round trip between neighbours
    is on the critical path, so latency costs more here than in `eager_1f1b`.

    Args:
        ranks: p, 1 or more; one stage per rank, stage s on rank s.
        microbatches: m, 1 or more.

    Returns:
        A schedule of F and B actions.

    Raises:
        ScheduleError: an argument is not an integer or is less than 1.

    Example:
        >>> for row in one_f_one_b(ranks=2, microbatches=3).actions:
        ...     print(*row)
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    ranks, microbatches = plain_counts(ranks=ranks, microbatches=microbatches)
    return one_forward_one_backward("one_f_one_b", ranks=ranks, microbatches=microbatches, ahead=1)


def eager_1f1b(*, ranks: int, microbatches: int) -> Schedule:
    """Eager 1F1B: 1F1B that runs twice as far ahead, to hide the latency between ranks.

    Source: AlpaComm, https://arxiv.org/abs/2211.05322; also in JaxPP.

    As `one_f_one_b`, but rank r runs 2(p−1−r) forwards ahead, so that a message has a whole turn
    to travel. The bubble without latency is the same (p−1)(f+b); rank 0 holds min(2p−1, m)
    microbatches at its peak. Both hold for every p and m.

    Args:
        ranks: p, 1 or more; one stage per rank, stage s on rank s.
        microbatches: m, 1 or more.

    Returns:
        A schedule of F and B actions.

    Raises:
        ScheduleError: an argument is not an integer or is less than 1.

    Example:
        >>> for row in eager_1f1b(ranks=2, microbatches=3).actions:
        ...     print(*row)
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    ranks, microbatches = plain_counts(ranks=ranks, microbatches=microbatches)
    return one_forward_one_backward("eager_1f1b", ranks=ranks, microbatches=microbatches, ahead=2)


def zb_h1(*, ranks: int, microbatches: int) -> Schedule:
    """ZB-H1: 1F1B whose weight gradients fill the bubble, at the memory of 1F1B.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, https://arxiv.org/abs/2401.10241.

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
        ScheduleError: an argument is not an integer or is less than 1.

    Example:
        >>> for row in zb_h1(ranks=2, microbatches=3).actions:
        ...     print(*row)
        0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    ranks, microbatches = plain_counts(ranks=ranks, microbatches=microbatches)
    return one_forward_one_backward("zb_h1", ranks=ranks, microbatches=microbatches, ahead=1, lag=1)


def zb_h2(*, ranks: int, microbatches: int) -> Schedule:
    """ZB-H2: no bubble between a rank's first and last action, at twice the memory of 1F1B.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, https://arxiv.org/abs/2401.10241.

    Rank r runs 2(p−1−r) forwards ahead and holds back 2r weight gradients, so that every rank is
    busy from its first action to its last. With f, i, w the times of F, I and W, the longest rank's
    span (first start to last end) is longer than its work by max(0, (p−1)(f+i−2w)), where m ≥ 2p−1
    and w is no longer than f or i. A rank holds min(2p−1, m) microbatches at its peak. With fewer
    microbatches it runs, without that promise.

    The ranks end one after the other, as they start, so a step that ends in a barrier (an
    optimizer that needs the norm of all gradients) sees the bubble again.

    Args:
        ranks: p, 1 or more; one stage per rank, stage s on rank s.
        microbatches: m, 1 or more; built for 2p−1 or more.

    Returns:
        A schedule of F, I and W actions.

    Raises:
        ScheduleError: an argument is not an integer or is less than 1.

    Example:
        >>> for row in zb_h2(ranks=2, microbatches=3).actions:
        ...     print(*row)
        0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
    """
    ranks, microbatches = plain_counts(ranks=ranks, microbatches=microbatches)
    return one_forward_one_backward("zb_h2", ranks=ranks, microbatches=microbatches, ahead=2, lag=2)
