"""Schedules that repeat one building block with a period: V-Min and V-Half."""

from __future__ import annotations

from collections.abc import Iterator

from fpipe.schedule.action import Action, Op
from fpipe.schedule.arguments import plain_counts
from fpipe.schedule.placements import vee
from fpipe.schedule.schedule import Schedule


def v_min(*, ranks: int, microbatches: int) -> Schedule:
    """V-Min: a third of the memory of 1F1B, on the V.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory,
    https://arxiv.org/abs/2405.15362, built anew from the paper's building block.

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
        ScheduleError: an argument is not an integer or is less than 1.

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


def v_half(*, ranks: int, microbatches: int) -> Schedule:
    """V-Half: half the memory of 1F1B, on the V.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory,
    https://arxiv.org/abs/2405.15362, built anew from the paper's building block.

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
        ScheduleError: an argument is not an integer or is less than 1.

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


PERIOD = 6  # slots: F, I and W of a rank's two stages


def repeat_block(
    *,
    ranks: int,
    microbatches: int,
    hops: tuple[int, int, int, int],
    turns: tuple[int, int, int],
    name: str,
) -> Schedule:
    """Repeat the building block of a microbatch, one period after the other.

    A microbatch passes along the ranks four times: F down the V, F up, I down, I up. `hops` says
    how many slots it takes from rank to rank on each pass, so the sum of two passes is the life of
    an activation, and the choice of hops sets the memory of the schedule. The next microbatch
    follows `PERIOD` slots later; W's take the slots that are left. Only the order is kept: an
    action that can start earlier, as in the fill, does.

    The slots of `turns` are lost where a pass ends and the next begins, such that no rank has two
    actions in one slot (mod `PERIOD`).

    Example:
        >>> block = repeat_block(
        ...     ranks=1, microbatches=1, hops=(1, 1, 1, 1), turns=(0, 0, 0), name="block"
        ... )
        >>> print(*block.actions[0])
        0F0 1F0 1I0 0I0 1W0 0W0
    """
    rows = []
    for rank, block in enumerate(_block(ranks, hops, turns)):
        up = 2 * ranks - 1 - rank
        words = (rank, Op.F), (up, Op.F), (up, Op.I), (rank, Op.I), (up, Op.W), (rank, Op.W)
        slots = (
            (slot + PERIOD * microbatch, Action(stage, op, microbatch))
            for microbatch in range(microbatches)
            for slot, (stage, op) in zip(block, words, strict=True)
        )
        rows.append([action for _, action in sorted(slots)])
    return Schedule(vee(ranks), rows, name=name)


def _block(
    ranks: int, hops: tuple[int, int, int, int], turns: tuple[int, int, int]
) -> Iterator[list[int]]:
    """Per rank, the slots of F down, F up, I down, I up, and of W of its last and first stage."""
    down, up = range(ranks), range(ranks)[::-1]
    slot = 0
    passes: list[dict[int, int]] = []
    for hop, order, lost in zip(hops, (down, up, down, up), (*turns, 0), strict=True):
        passes.append({rank: slot + hop * step for step, rank in enumerate(order)})
        slot = passes[-1][order[-1]] + 1 + lost
    for rank in down:
        slots = [each[rank] for each in passes]
        free = set(range(PERIOD)) - {slot % PERIOD for slot in slots}
        yield [*slots, *_weights(slots[2], slots[3], free)]


def _weights(down: int, up: int, free: set[int]) -> tuple[int, int]:
    """The two free slots for the W's after I's at slots `down` and `up`, the sooner the better."""
    one, other = sorted(free)

    def after(slot: int, residue: int) -> int:
        return slot + 1 + (residue - slot - 1) % PERIOD

    choices = [(after(down, one), after(up, other)), (after(down, other), after(up, one))]
    return min(choices, key=lambda slots: (sum(slots), slots))
