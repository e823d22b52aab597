"""What a rank holds over time, from what it ran."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

from fpipe.schedule.action import COMPUTE_OPS, Action, Op

# A timeline's `Event`; spelt out because the timeline imports this module.
Timed: TypeAlias = tuple[int, Action, float, float]
Steps: TypeAlias = tuple[tuple[float, float], ...]  # a time, and the amount held from then on


def held(row: Sequence[Timed], activation: Sequence[float], freed_by_i: Sequence[float]) -> Steps:
    """The activations that a rank holds over time.

    F takes its activation when it starts; I frees its part, and B or W the rest, when it ends.
    Where a microbatch has no I or no W of a stage, the other frees all; where a stage has no
    backward, F keeps none.

    Args:
        row: what the rank ran, in order: rank, action, start and end.
        activation: per stage, what F keeps.
        freed_by_i: per stage, the part of it that I frees.

    Example:
        >>> row = [(0, Action(0, Op.F, 0), 0.0, 1.0), (0, Action(0, Op.B, 0), 1.0, 3.0)]
        >>> held(row, activation=[5], freed_by_i=[0])
        ((0.0, 5), (3.0, 0))
    """
    halves = {action for _, action, _, _ in row if action.op in (Op.I, Op.W)}
    read = {stage for _, (stage, op, _), _, _ in row if op in (Op.B, Op.I, Op.W)}  # by a backward
    times: list[float] = []
    changes: list[float] = []
    for _, (stage, op, microbatch), start, end in row:
        if op not in COMPUTE_OPS or stage not in read:
            continue
        kept, freed = activation[stage], freed_by_i[stage]
        if op == Op.F:
            change = kept
        elif op == Op.I and (stage, Op.W, microbatch) in halves:
            change = -freed
        elif op == Op.W and (stage, Op.I, microbatch) in halves:
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
