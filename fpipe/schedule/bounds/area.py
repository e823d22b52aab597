"""Memory times time must have room for the life of every activation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fpipe.schedule.bounds.rank import RankProblem
from fpipe.schedule.cost import StageCosts


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
        return _plain(problem, span)
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


def _plain(problem: RankProblem, span: bool) -> float:
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
