"""Rows as words without microbatch numbers, and the 1F1B pattern that most families share.

Nearly every published schedule lets each stage take its microbatches in order. So the order of
``(stage, op)`` words fixes a row, and the families can be written as short patterns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from fpipe.errors import ScheduleError
from fpipe.schedule.action import Action, Op
from fpipe.schedule.placements import looped
from fpipe.schedule.schedule import Schedule

Word = tuple[int, Op]  # (stage, op): an action that waits for its microbatch number


def numbered(words: Iterable[Word], microbatches: int) -> Iterator[Action]:
    """Number the words: the k-th F of a stage is on microbatch k, and so for B or I, and B or W.

    Actions on microbatches from that number on are left out. So a family that is built for many
    microbatches serves few: what is left of a row that can run can still run, because no action
    reads another microbatch.

    Example:
        >>> " ".join(map(str, numbered([(0, Op.F), (0, Op.F), (0, Op.B), (0, Op.B)], 2)))
        '0F0 0F1 0B0 0B1'
    """
    forwards: defaultdict[int, int] = defaultdict(int)
    backwards: defaultdict[int, int] = defaultdict(int)
    weights: defaultdict[int, int] = defaultdict(int)
    for stage, op in words:
        count = forwards if op is Op.F else weights if op is Op.W else backwards
        microbatch = count[stage]
        count[stage] += 1
        if op is Op.B:  # I and W in one
            weights[stage] += 1
        if microbatch < microbatches:
            yield Action(stage, op, microbatch)


def one_forward_one_backward(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    stages_per_rank: int = 1,
    round_size: int | None = None,
    ahead: int,
    lag: int | None = None,
) -> Schedule:
    """The 1F1B pattern on looped stages: some forwards ahead, then F and a backward in turn.

    Args:
        name: of the schedule.
        ranks: p.
        microbatches: m.
        stages_per_rank: v; the stages of a rank take turns.
        round_size: microbatches that a stage takes before the next has its turn; it divides m.
            None for all.
        ahead: rank r runs ``ahead * (p - 1 - r)`` forwards before its first backward, and a round
            for each stage but one.
        lag: rank r holds back ``lag * r`` weight gradients; None for full backwards. Held back they
            cost memory, and let the input gradients leave early, for which other ranks wait.

    Example:
        >>> schedule = one_forward_one_backward("zb", ranks=2, microbatches=2, ahead=1, lag=1)
        >>> print(*schedule.actions[1])
        1F0 1I0 1F1 1I1 1W0 1W1
    """
    size = microbatches if round_size is None else round_size
    placement = looped(ranks, stages_per_rank)
    rows = []
    for rank in range(ranks):
        stages = range(rank, len(placement), ranks)
        forwards = _rounds(stages, size, microbatches)
        backwards = _rounds(stages[::-1], size, microbatches)
        turns = _full_turns(backwards) if lag is None else _split_turns(backwards, lag * rank)
        warmup = (stages_per_rank - 1) * size + ahead * (ranks - 1 - rank)
        rows.append(numbered(alternate(forwards, turns, warmup), microbatches))
    return Schedule(placement, rows, name=name)


def _rounds(stages: Sequence[int], size: int, microbatches: int) -> list[int]:
    """The stages of a pass: `size` microbatches on each stage, round after round."""
    return [stage for stage in stages for _ in range(size)] * (microbatches // size)


def alternate(
    forwards: Sequence[int], turns: Iterable[Sequence[Word]], warmup: int
) -> Iterator[Word]:
    """`warmup` forwards, then a forward and a backward turn alternate, then the turns left."""
    ahead, backwards = iter(forwards), iter(turns)
    yield from ((stage, Op.F) for stage in islice(ahead, warmup))
    for stage, turn in zip(ahead, backwards, strict=False):
        yield stage, Op.F
        yield from turn
    for turn in backwards:
        yield from turn


def _full_turns(stages: Iterable[int]) -> Iterator[Sequence[Word]]:
    return (((stage, Op.B),) for stage in stages)


def _split_turns(stages: Sequence[int], lag: int) -> Iterator[Sequence[Word]]:
    """Backward turns that do I, and the W of `lag` turns before; the last turn is the W's left."""
    for turn, stage in enumerate(stages):
        gradient = ((stage, Op.I),)
        yield gradient if turn < lag else (*gradient, (stages[turn - lag], Op.W))
    yield [(stage, Op.W) for stage in stages[max(0, len(stages) - lag) :]]


def equal_rounds(*, ranks: int, microbatches: int) -> int:
    """Microbatches in a round of an interleaved schedule: how many a stage takes before the next.

    There are ``max(1, microbatches // ranks)`` rounds, so a round is at least as long as the
    pipeline if there are enough microbatches (https://github.com/pytorch/pytorch/pull/129597).

    Raises:
        ScheduleError: the microbatches do not divide into rounds of one size.

    Example:
        >>> equal_rounds(ranks=4, microbatches=10)  # two rounds
        5
    """
    rounds = max(1, microbatches // ranks)
    size, rest = divmod(microbatches, rounds)
    if rest:
        # Both are rounds of one size: either the number of rounds stays, or there is one more.
        above = min(rounds * (size + 1), (rounds + 1) * ranks)
        raise ScheduleError(
            f"microbatches={microbatches} must divide into rounds of one size, and on "
            f"ranks={ranks} there are max(1, microbatches // ranks) = {rounds} rounds: "
            f"take {microbatches - rest} or {above} microbatches"
        )
    return size
