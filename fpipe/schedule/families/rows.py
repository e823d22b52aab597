"""How the families write a rank's row: words without microbatch numbers, numbered at the end.

Nearly every published schedule lets each stage take its microbatches in order, so a row is known
once the order of ``(stage, op)`` words is, and the families can be written as short patterns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from fpipe.errors import ScheduleError
from fpipe.schedule.action import Action, Op

Word = tuple[int, Op]  # (stage, op): an action that waits for its microbatch number


def numbered(words: Iterable[Word], microbatches: int) -> Iterator[Action]:
    """Number the words: the k-th F of a stage is on microbatch k, and so for B or I, and B or W.

    Args:
        words: the row of one rank.
        microbatches: actions on microbatches from this number on are left out, which is how a
            family that is built for many microbatches serves few: what is left of a row that
            could run can still run, for nothing reads another microbatch.

    Example:
        >>> " ".join(map(str, numbered([(0, Op.F), (0, Op.F), (0, Op.B), (0, Op.B)], 2)))
        '0F0 0F1 0B0 0B1'
    """
    forwards: defaultdict[int, int] = defaultdict(int)
    backwards: defaultdict[int, int] = defaultdict(int)
    weights: defaultdict[int, int] = defaultdict(int)
    for stage, op in words:
        if op is Op.F:
            microbatch = forwards[stage]
            forwards[stage] += 1
        elif op is Op.W:
            microbatch = weights[stage]
            weights[stage] += 1
        else:
            microbatch = backwards[stage]
            backwards[stage] += 1
            if op is Op.B:  # I and W in one
                weights[stage] += 1
        if microbatch < microbatches:
            yield Action(stage, op, microbatch)


def weave(
    forwards: Sequence[int], backwards: Iterable[Sequence[Word]], warmup: int
) -> Iterator[Word]:
    """One forward, one backward: `warmup` forwards, then F and backward in turn, then backwards.

    Args:
        forwards: the stages of the forwards, in order.
        backwards: what is done at each backward turn, as many turns as there are forwards. Any
            turns beyond follow at the end.
        warmup: forwards before the first turn; all of them where there are fewer.

    Example:
        >>> row = weave([0, 0, 0], [[(0, Op.B)]] * 3, warmup=1)
        >>> "".join(op for _, op in row)
        'FFBFBB'
    """
    ahead = iter(forwards)
    turns = iter(backwards)
    yield from ((stage, Op.F) for stage in islice(ahead, warmup))
    for stage, turn in zip(ahead, turns, strict=False):
        yield stage, Op.F
        yield from turn
    for turn in turns:
        yield from turn


def full(stages: Iterable[int]) -> Iterator[Sequence[Word]]:
    """Backward turns that do I and W in one.

    Example:
        >>> [[op.value for _, op in turn] for turn in full([0, 0])]
        [['B'], ['B']]
    """
    return (((stage, Op.B),) for stage in stages)


def split(stages: Sequence[int], lag: int) -> Iterator[Sequence[Word]]:
    """Backward turns that do I, and the W of `lag` turns before; the last turn is the W's left.

    Holding back `lag` weight gradients costs their memory, and lets the input gradients, which
    other ranks wait for, leave early.

    Example:
        >>> [[op.value for _, op in turn] for turn in split([0, 0, 0], lag=1)]
        [['I'], ['I', 'W'], ['I', 'W'], ['W']]
    """
    for turn, stage in enumerate(stages):
        done = ((stage, Op.I),)
        yield done if turn < lag else (*done, (stages[turn - lag], Op.W))
    yield [(stage, Op.W) for stage in stages[max(0, len(stages) - lag) :]]


def rounds(stages: Sequence[int], size: int, microbatches: int) -> list[int]:
    """The stages of an interleaved pass: `size` microbatches on each stage, round after round.

    Args:
        stages: the stages of one rank in the order in which the pass meets them.
        size: microbatches in a round; it divides `microbatches`.
        microbatches: microbatches in all.

    Example:
        >>> rounds([0, 2], size=2, microbatches=4)
        [0, 0, 2, 2, 0, 0, 2, 2]
    """
    return [stage for stage in stages for _ in range(size)] * (microbatches // size)


def round_size(*, ranks: int, microbatches: int) -> int:
    """Microbatches in a round of an interleaved schedule: how many a stage takes before the next.

    There are ``max(1, microbatches // ranks)`` rounds, so a round is at least as long as the
    pipeline wherever there are microbatches enough (https://github.com/pytorch/pytorch/pull/129597).

    Raises:
        ScheduleError: the microbatches do not divide into rounds of one size.

    Example:
        >>> round_size(ranks=4, microbatches=10)  # two rounds
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
