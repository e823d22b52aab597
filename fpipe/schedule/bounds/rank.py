"""What one rank must do and wait for, when all the others are as fast as can be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fpipe.schedule.cost import StageCosts


@dataclass(frozen=True)
class RankProblem:
    """One rank's part of a step. Times are the least that any schedule can reach, fills the most.

    Attributes:
        costs: the costs of all stages.
        stages: the rank's own, in order.
        microbatches: their number.
        memory: the rank's limit.
        release: when its first forward can start.
        work: all it computes.
        first_return: from its first forward's start to the start of its first backward.
        forward_fill: what it can compute in that time: the forwards that its memory holds.
        tail: from the end of its last input gradient to the end of the step; 0 with stage 0.
        deferred_fill: what it can compute in that time: the weight gradients of what it holds.
        last_trip: from the end of its last forward to the end of the step.
        own_last_trip: from the end of its last forward to its own end.
        backward_fill: what it can compute in that time: the backwards of what it holds.
        all_fit: whether its memory holds every microbatch at once.
    """

    costs: StageCosts
    stages: tuple[int, ...]
    microbatches: int
    memory: float
    release: float
    work: float
    first_return: float
    forward_fill: float
    tail: float
    deferred_fill: float
    last_trip: float
    own_last_trip: float
    backward_fill: float
    all_fit: bool


def rank_problem(
    costs: StageCosts, stages: Sequence[int], microbatches: int, memory: float
) -> RankProblem:
    """The bounds' view of one rank, whose `stages` are in order."""
    first, last = stages[0], stages[-1]
    full = costs.backward
    hand = costs.handover
    starts, returns = costs.lone
    first_return = returns[last] - starts[first]
    trip = returns[0] + full[0] - (starts[last] + costs.f[last])
    held, kept_for_w = costs.activation, costs.deferred

    def fill(
        worth: Sequence[float] | Mapping[int, float], size: Sequence[float], room: Sequence[float]
    ) -> float:
        items = [(worth[s], size[s], room[k]) for k, s in enumerate(stages)]
        return most(items, microbatches, memory)

    everything = [float("inf")] * len(stages)
    return RankProblem(
        costs=costs,
        stages=tuple(stages),
        microbatches=microbatches,
        memory=memory,
        release=starts[first],
        work=microbatches * sum(costs.f[s] + full[s] for s in stages),
        first_return=first_return,
        # A forward of a later stage has the less room, the later its first input can arrive.
        forward_fill=fill(
            costs.f, held, [first_return - starts[s] + starts[first] for s in stages]
        ),
        tail=returns[0] + full[0] - returns[first] - hand[first] if first else 0.0,
        deferred_fill=fill({s: full[s] - hand[s] for s in stages}, kept_for_w, everything),
        last_trip=trip,
        own_last_trip=returns[first] + full[first] - (starts[last] + costs.f[last]),
        # What is held is either before its I, all of it, or between I and W.
        backward_fill=most(
            [(full[s], held[s], float("inf")) for s in stages]
            + [(full[s] - hand[s], kept_for_w[s], float("inf")) for s in stages],
            microbatches,
            memory,
        ),
        all_fit=microbatches * sum(held[s] for s in stages) <= memory * (1 + 1e-9),
    )


def most(items: Iterable[tuple[float, float, float]], each: int, memory: float) -> float:
    """The most worth that fits in memory: items of (worth, size, most total worth), `each` of all.

    Exact where all sizes are equal; else the fractional knapsack, which is never less.
    """
    rows = sorted(
        ((worth, size, room) for worth, size, room in items if worth > 0),
        key=lambda item: item[1] / item[0],
    )
    sizes = {size for _, size, _ in rows}
    if len(sizes) == 1 and memory < float("inf") and (size := sizes.pop()) > 0:
        memory = (memory / size + 1e-9) // 1 * size
    total = 0.0
    for worth, size, room in rows:
        gained = min(each * worth, max(0.0, room))
        if size > 0:
            gained = min(gained, memory / size * worth)
            memory = max(0.0, memory - gained / worth * size)
        total += gained
    return total
