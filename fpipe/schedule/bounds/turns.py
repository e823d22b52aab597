"""Where memory holds few microbatches, they take turns, and each turn lasts a whole round trip."""

from __future__ import annotations

import math

from fpipe.schedule.bounds.area import lives
from fpipe.schedule.bounds.rank import RankProblem


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
