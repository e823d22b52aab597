"""Schedules on the V that repeat one building block, a microbatch's own pattern, with a period."""

from __future__ import annotations

from collections.abc import Iterator

from fpipe.schedule.action import Action, Op
from fpipe.schedule.placements import vee
from fpipe.schedule.schedule import Schedule

PERIOD = 6  # slots: F, I and W of a rank's two stages


def repeat_block(
    *,
    ranks: int,
    microbatches: int,
    hops: tuple[int, int, int, int],
    turns: tuple[int, int, int],
    name: str,
) -> Schedule:
    """Repeat a building block, as "Pipeline Parallelism with Controllable Memory" teaches it
    (Qi et al., https://arxiv.org/abs/2405.15362).

    A microbatch goes four times along the ranks: F down the V, F up, I down, I up. `hops` says how
    many slots it takes from rank to rank on each of the ways, so the sum of two ways is the life of
    an activation and the choice of hops the memory of the schedule. The next microbatch follows
    `PERIOD` slots later; W's take the slots that are left. Here only the order is kept: what could
    start earlier, in the fill above all, does.

    Args:
        ranks: p, 1 or more.
        microbatches: m, 1 or more.
        hops: slots from one rank to the next, on each of the four ways.
        turns: slots lost where a way ends and the next begins, such that no rank has two actions
            in one slot (mod `PERIOD`).
        name: of the schedule.

    Example:
        >>> block = repeat_block(
        ...     ranks=1, microbatches=1, hops=(1, 1, 1, 1), turns=(0, 0, 0), name="block"
        ... )
        >>> print(*block.actions[0])
        0F0 1F0 1I0 0I0 1W0 0W0
    """
    rows = []
    for rank, block in enumerate(_block(ranks, hops, turns)):
        slots = (
            (slot + PERIOD * microbatch, Action(*_stage_and_op(rank, ranks, way), microbatch))
            for microbatch in range(microbatches)
            for way, slot in enumerate(block)
        )
        rows.append([action for _, action in sorted(slots)])
    return Schedule(vee(ranks), rows, name=name)


def _stage_and_op(rank: int, ranks: int, way: int) -> tuple[int, Op]:
    up = 2 * ranks - 1 - rank
    return ((rank, Op.F), (up, Op.F), (up, Op.I), (rank, Op.I), (up, Op.W), (rank, Op.W))[way]


def _block(
    ranks: int, hops: tuple[int, int, int, int], turns: tuple[int, int, int]
) -> Iterator[list[int]]:
    """Per rank, the slots of F down, F up, I down, I up, and of W of its last and first stage."""
    there, back = range(ranks), range(ranks)[::-1]
    slot = 0
    ways: list[dict[int, int]] = []
    for way, (hop, order) in enumerate(zip(hops, (there, back, there, back), strict=True)):
        ways.append({rank: slot + hop * step for step, rank in enumerate(order)})
        slot = ways[-1][order[-1]] + 1 + (turns[way] if way < 3 else 0)
    for rank in there:
        slots = [way[rank] for way in ways]
        free = set(range(PERIOD)) - {slot % PERIOD for slot in slots}
        yield [*slots, *_weights(slots[2], slots[3], free)]


def _weights(down: int, up: int, free: set[int]) -> tuple[int, int]:
    """The two free slots for the W's after I's at slots `down` and `up`, the sooner the better."""
    one, other = sorted(free)

    def after(slot: int, residue: int) -> int:
        return slot + 1 + (residue - slot - 1) % PERIOD

    choices = [(after(down, one), after(up, other)), (after(down, other), after(up, one))]
    return min(choices, key=lambda slots: (sum(slots), slots))
