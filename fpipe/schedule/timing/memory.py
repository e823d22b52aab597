"""What a rank holds over time, from what it ran."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

from fpipe.schedule.action import COMPUTE_OPS, Action, Op
from fpipe.schedule.cost import StageCosts
from fpipe.schedule.timing.event import Event

Steps: TypeAlias = tuple[tuple[float, float], ...]  # a time, and the amount held from then on


def counted_as(actions: Sequence[Action]) -> list[Op | None]:
    """What each action does to what its stage holds of a microbatch, as the op that does so.

    Where a microbatch has no I or no W of a stage, the other is all of its backward, as B is. None
    for what holds nothing: an F of a stage without a backward, and what computes nothing.

    Args:
        actions: all of the stages that they name.

    Example:
        >>> counted_as([Action.parse(word) for word in "0F0 0I0 0W0 1F0 1W0 2F0".split()])
        [<Op.F: 'F'>, <Op.I: 'I'>, <Op.W: 'W'>, <Op.F: 'F'>, <Op.B: 'B'>, None]
    """
    halves = {action for action in actions if action.op in (Op.I, Op.W)}
    read = {stage for stage, op, _ in actions if op in (Op.B, Op.I, Op.W)}  # by a backward

    def count(stage: int, op: Op, microbatch: int | None) -> Op | None:
        if op not in COMPUTE_OPS or stage not in read:
            return None
        if op == Op.F or (op == Op.I and (stage, Op.W, microbatch) in halves):
            return op
        return op if op == Op.W and (stage, Op.I, microbatch) in halves else Op.B

    return [count(*action) for action in actions]


def held(row: Sequence[Event], costs: StageCosts) -> Steps:
    """The activations that a rank holds over time.

    F takes its activation when it starts; I frees its part, and B or W the rest, when it ends.
    Where a microbatch has no I or no W of a stage, the other frees all; where a stage has no
    backward, F keeps none.

    Args:
        row: what the rank ran, in order.
        costs: what F keeps of each stage, and I frees, for a microbatch of size 1.

    Example:
        >>> from fpipe import Cost
        >>> row = [Event(0, Action(0, Op.F, 0), 0.0, 1.0), Event(0, Action(0, Op.B, 0), 1.0, 3.0)]
        >>> held(row, Cost(f=1, i=1, w=1, activation=5).on([0]))
        ((0.0, 5), (3.0, 0))
    """
    times: list[float] = []
    changes: list[float] = []
    ops = counted_as([action for _, action, _, _ in row])
    for (_, (stage, _, microbatch), start, end), op in zip(row, ops, strict=True):
        if op is None:
            continue
        size = 1 if costs.sizes is None or microbatch is None else costs.sizes[microbatch]
        kept, freed = costs.activation[stage] * size, costs.freed_by_i[stage] * size
        if op == Op.F:
            change = kept
        elif op == Op.I:
            change = -freed
        elif op == Op.W:
            change = freed - kept
        else:
            change = -kept
        times.append(start if op == Op.F else end)
        changes.append(change)
    # Sums of thirds and the like drift; a peak of 2.9999999999999996 reads as a defect.
    largest = max(changes, default=0)
    digits = 12 - math.floor(math.log10(largest)) if 0 < largest < 1 else 12
    amounts = (round(amount, digits) for amount in accumulate(changes))
    return tuple(zip(times, amounts, strict=True))
