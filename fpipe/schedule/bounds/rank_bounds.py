"""Bounds of one rank, when all the others are as fast as can be."""

from __future__ import annotations

import math
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


def area_bound(problem: RankProblem, span: bool) -> float:
    """The time that a rank needs because activations live for a round trip and memory is limited.

    An activation of stage s lives for at least L_s = f + (round trip behind s) + i + w, so the rank
    needs ``m * sum(L_s)`` of memory times time. Where all its activations have one size, n of them
    fit, and the corners stay empty: they begin one forward apart and end one release apart,

        time >= [m * sum(L_s) + (f + w) n (n - 1) / 2] / n.

    Of the n, k may wait for their W when the rank's last input gradient ends, as the gradient
    travels on to stage 0; the bound is the least over k. Finite for every memory, and of interest
    where memory is less than about a round trip over f + i + w.
    """
    costs, stages = problem.costs, problem.stages
    sizes = {costs.activation[stage] for stage in stages}
    if len(sizes) > 1 or any(costs.freed_by_i[stage] for stage in stages):
        return _area_without_corners(problem, span)
    full, hand = costs.backward, costs.handover
    jobs = problem.microbatches * len(stages)
    size = sizes.pop()
    room = jobs if size == 0 else math.floor(min(jobs, problem.memory / size + 1e-9))
    total = problem.microbatches * sum(lives(costs, stages))
    forward = min(costs.f[stage] for stage in stages)
    deferred = max(full[stage] - hand[stage] for stage in stages)
    gradient = min(hand[stage] for stage in stages)
    release = min(min(costs.w[stage], costs.b[stage]) for stage in stages)
    start = 0.0 if span else problem.release
    up = forward * room * (room - 1) / 2

    def ends(waiting: int) -> float:
        done = room - waiting
        area = total - waiting * deferred + gradient * waiting * (waiting - 1) / 2
        last = (area + up + release * done * (done - 1) / 2) / room
        return last + max(0.0 if span else problem.tail, waiting * release)

    return start + max(
        min(map(ends, range(room + 1))),
        # All of it, to the rank's own last release.
        (total + up + release * room * (room - 1) / 2) / room,
    )


def _area_without_corners(problem: RankProblem, span: bool) -> float:
    """Without corners, for activations of unequal sizes: life times size over memory."""
    if math.isinf(problem.memory):
        return 0.0
    area = problem.microbatches * area_of(problem.costs, problem.stages)
    # Where nothing is kept there may be no memory either.
    return (0.0 if span else problem.release) + (area / problem.memory if area else 0.0)


def area_of(costs: StageCosts, stages: Sequence[int]) -> float:
    """Memory times time that one microbatch takes of the rank of these stages, at least."""
    full, hand, later = costs.backward, costs.handover, costs.deferred
    area = 0.0
    for stage, life in zip(stages, lives(costs, stages), strict=True):
        # Between I and W it may hold less; a full B holds all of it, and takes `full` at least.
        tail = full[stage] - hand[stage]
        saved = max(0.0, costs.activation[stage] - later[stage]) * tail
        area += life * costs.activation[stage] - saved
    return area


def lives(costs: StageCosts, stages: Sequence[int]) -> list[float]:
    """The least life of one activation of each of the stages, from F's start to W's end."""
    starts, returns = costs.lone
    full = costs.backward
    return [returns[stage] - starts[stage] + full[stage] for stage in stages]


def turns_bound(problem: RankProblem, span: bool) -> float:
    """The time that a rank needs because its memory is handed on from microbatch to microbatch.

    If K activations of the rank's first stage fit, its forward number g·K (from 0) must wait for
    one that is released, so it starts no earlier than g lives L after the first. Its backward
    starts a round trip later. Until then the rank has done at most K (g + 1) forwards and g·K
    backwards of that stage: whatever work is left comes after, and so does the idle time after the
    last forward, if that one is still to come. The bound is the greatest over g.

    It takes over from the area bound where L is a little more than K (f + i + w), so that the turns
    neither fit nor dominate.
    """
    costs, first = problem.costs, problem.stages[0]
    size = costs.activation[first]
    if size == 0 or math.isinf(problem.memory) or costs.freed_by_i[first] > 0:
        return 0.0
    slots = max(1, math.floor(problem.memory / size + 1e-9))
    microbatches, work = problem.microbatches, costs.backward
    life = lives(problem.costs, problem.stages)[0]
    others = sum(costs.f[stage] + work[stage] for stage in problem.stages[1:])
    trip = problem.own_last_trip if span else problem.last_trip
    at_the_end = max(0.0, trip - problem.backward_fill)
    bound = 0.0
    for turn in range(1, (microbatches - 1) // slots + 1):
        begun = min(microbatches, slots * (turn + 1))
        done = begun * (costs.f[first] + others) + slots * turn * work[first]
        reached = turn * life + life - work[first]
        bound = max(bound, reached + problem.work - done + at_the_end * (begun < microbatches))
    return bound + (0.0 if span else problem.release)
