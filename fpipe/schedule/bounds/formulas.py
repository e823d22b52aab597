"""Formulas that bound a step: by one rank, by its messages, and by its whole-stage work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fpipe.schedule.stage_costs import StageCosts


@dataclass(frozen=True)
class RankProblem:
    """One rank of a pipeline. Times are the least that any schedule can reach, fills the most."""

    costs: StageCosts
    stages: tuple[int, ...]
    microbatches: int
    memory: float

    @cached_property
    def release(self) -> float:
        """When the first forward can start."""
        return self.costs.earliest[0][self.stages[0]]

    @cached_property
    def work(self) -> float:
        """Time of all actions of the rank."""
        return self.microbatches * sum(self.costs.work[stage] for stage in self.stages)

    @cached_property
    def tail(self) -> float:
        """From the end of the last input gradient to the end of the step; 0 with stage 0."""
        return self.costs.tail_of(self.stages[0])

    def idle_after_last_forward(self, span: bool) -> float:
        """The time that the last forward travels, less what the rank can compute meanwhile.

        It travels to the end of the step, or of the rank itself for a span. Meanwhile the rank can
        run only the backwards of what it holds: all of a backward before its I, or its W after.
        """
        costs, last, end = self.costs, self.stages[-1], self.stages[0] if span else 0
        starts, returns = costs.earliest
        full, gradient = costs.backward, costs.gradient
        trip = returns[end] + full[end] - (starts[last] + costs.f[last])
        fill = self.most_work(
            [(full[s], costs.activation[s], math.inf) for s in self.stages]
            + [(full[s] - gradient[s], costs.deferred[s], math.inf) for s in self.stages]
        )
        return max(0.0, trip - fill)

    def most_work(self, items: Iterable[tuple[float, float, float]]) -> float:
        """The most work that fits in the memory: items of (time, size, most total time) of one
        microbatch. Exact where all sizes are equal; else the fractional knapsack, never less."""
        rows = sorted(
            ((time, size, room) for time, size, room in items if time > 0),
            key=lambda item: item[1] / item[0],
        )
        memory, sizes = self.memory, {size for _, size, _ in rows}
        if len(sizes) == 1 and memory < math.inf and (size := sizes.pop()) > 0:
            memory = (memory / size + 1e-9) // 1 * size
        total = 0.0
        for time, size, room in rows:
            gained = min(self.microbatches * time, max(0.0, room))
            if size > 0:
                gained = min(gained, memory / size * time)
                memory = max(0.0, memory - gained / time * size)
            total += gained
        return total


def idle_bound(problem: RankProblem, span: bool) -> float:
    """The work of the rank, and the waits before its first backward and at its end.

    Before the first gradient comes back, the rank can run only the forwards that its memory holds.
    After its last input gradient it can run only the weight gradients of what it still holds, while
    the gradient travels on to stage 0; after its last forward see `idle_after_last_forward`.
    """
    costs, stages = problem.costs, problem.stages
    starts, returns = costs.earliest
    full, gradient = costs.backward, costs.gradient
    first_return = returns[stages[-1]] - starts[stages[0]]
    # A forward of a later stage has the less room, the later its first input can arrive.
    forward_fill = problem.most_work(
        (costs.f[s], costs.activation[s], first_return - starts[s] + starts[stages[0]])
        for s in stages
    )
    weight_fill = problem.most_work(
        (full[s] - gradient[s], costs.deferred[s], math.inf) for s in stages
    )
    head = max(0.0, first_return - forward_fill)
    after_gradient = 0.0 if span else max(0.0, problem.tail - weight_fill)
    after_forward = problem.idle_after_last_forward(span)
    held = problem.microbatches * sum(costs.activation[s] for s in stages)
    if held <= problem.memory * (1 + 1e-9):
        # Every forward may run before the first gradient: the two windows may be one and the same.
        idle = max(head + after_gradient, after_forward)
    else:
        idle = head + max(after_gradient, after_forward)
    return float((0.0 if span else problem.release) + problem.work + idle)


def area_bound(problem: RankProblem, span: bool) -> float:
    """Memory times time must have room for the life of every activation.

    An activation of stage s lives for at least L_s = f + (round trip behind s) + i + w, so the rank
    needs ``m * sum(L_s)`` of memory times time. Where all its activations have one size, n of them
    fit, and the corners stay empty: they begin one forward apart and end one release apart,

        time >= [m * sum(L_s) + (f + w) n (n - 1) / 2] / n.

    Of the n, k may wait for their W when the rank's last input gradient ends, as the gradient
    travels on to stage 0; the bound is the least over k. It is finite for every memory, and matters
    where memory is less than about a round trip over f + i + w.
    """
    costs, stages = problem.costs, problem.stages
    start = 0.0 if span else problem.release
    sizes = {costs.activation[stage] for stage in stages}
    if len(sizes) > 1 or any(costs.freed_by_i[stage] for stage in stages):
        # Without corners, for activations of unequal sizes.
        if math.isinf(problem.memory):
            return 0.0
        area = problem.microbatches * area_of(costs, stages)
        # Where nothing is kept there may be no memory either.
        return start + (area / problem.memory if area else 0.0)
    full, hand = costs.backward, costs.gradient
    jobs = problem.microbatches * len(stages)
    size = sizes.pop()
    room = jobs if size == 0 else math.floor(min(jobs, problem.memory / size + 1e-9))
    total = problem.microbatches * sum(lives(costs, stages))
    forward = min(costs.f[stage] for stage in stages)
    deferred = max(full[stage] - hand[stage] for stage in stages)
    gradient = min(hand[stage] for stage in stages)
    release = min(min(costs.w[stage], costs.b[stage]) for stage in stages)
    up = forward * room * (room - 1) / 2

    def ends(waiting: int) -> float:
        done = room - waiting
        area = total - waiting * deferred + gradient * waiting * (waiting - 1) / 2
        last = (area + up + release * done * (done - 1) / 2) / room
        return last + max(0.0 if span else problem.tail, waiting * release)

    return start + max(
        min(map(ends, range(room + 1))),
        # All of it, to the last release on the rank.
        (total + up + release * room * (room - 1) / 2) / room,
    )


def area_of(costs: StageCosts, stages: Sequence[int]) -> float:
    """Memory times time that one microbatch takes of the rank of these stages, at least."""
    area = 0.0
    for stage, life in zip(stages, lives(costs, stages), strict=True):
        # Between I and W it may hold less; a full B holds all of it, and takes `backward` at least.
        tail = costs.backward[stage] - costs.gradient[stage]
        saved = max(0.0, costs.activation[stage] - costs.deferred[stage]) * tail
        area += life * costs.activation[stage] - saved
    return area


def lives(costs: StageCosts, stages: Sequence[int]) -> list[float]:
    """The least life of one activation of each of the stages, from F's start to W's end."""
    starts, returns = costs.earliest
    return [returns[stage] - starts[stage] + costs.backward[stage] for stage in stages]


def turns_bound(problem: RankProblem, span: bool) -> float:
    """Microbatches take turns in scarce memory, and each turn lasts a whole round trip.

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
    microbatches, backward = problem.microbatches, costs.backward
    life = lives(costs, problem.stages)[0]
    others = sum(costs.work[stage] for stage in problem.stages[1:])
    at_the_end = problem.idle_after_last_forward(span)
    bound = 0.0
    for turn in range(1, (microbatches - 1) // slots + 1):
        begun = min(microbatches, slots * (turn + 1))
        done = begun * (costs.f[first] + others) + slots * turn * backward[first]
        reached = turn * life + life - backward[first]
        bound = max(bound, reached + problem.work - done + at_the_end * (begun < microbatches))
    return bound + (0.0 if span else problem.release)


def message_bound(
    costs: StageCosts, stages_of: Sequence[Sequence[int]], work: float, messages: float
) -> float:
    """The makespan by the busiest link, and by the busiest rank where that does nothing else while
    it sends; 0 where no transfer takes any time.

    A link carries one message at a time: before its first one, all of them, after its last.

    The costs are of the smallest microbatch. As many of that size as `work` take as long, and as
    many as `messages` send as much, as all there are.

    Example:
        >>> from fpipe import Cost
        >>> message_bound(Cost(f=1, i=1, w=1, transfer=10).on([0, 1]), [[0], [1]], 8, 8)
        94.0
        >>> blocking = Cost(f=1, i=1, w=1, transfer=2, blocking=True).on([0, 1])
        >>> message_bound(blocking, [[0], [1]], 8, 8)
        43.0
    """
    starts, returns = costs.earliest
    end = returns[0] + costs.gradient[0]
    first: dict[int, float] = {}  # by link: when its first message is there at the earliest
    load: dict[int, float] = {}
    rest: dict[int, float] = {}  # the least time from a transfer to the end of the step
    for stage, (down, up) in enumerate(zip(costs.down_links, costs.up_links, strict=True)):
        for link, made, read in (
            (down, starts[stage] + costs.f[stage], starts[stage + 1]),
            (up, returns[stage + 1] + costs.gradient[stage + 1], returns[stage]),
        ):
            if link.transfer:
                at = link.number
                first[at] = min(made, first.get(at, made))
                load[at] = load.get(at, 0.0) + messages * link.transfer
                after = link.latency + end - read
                rest[at] = min(after, rest.get(at, after))
    best = max((first[at] + load[at] + rest[at] for at in first), default=0.0)
    for stages in stages_of if costs.blocking else ():
        total = starts[stages[0]] if stages else 0.0
        for stage in stages:
            total += work * costs.work[stage]
            if stage < len(costs.down_links):
                total += messages * costs.down_links[stage].transfer
            if stage:
                total += messages * costs.up_links[stage - 1].transfer
        best = max(best, total)
    return best


def with_whole_stage_work(
    bound: float,
    costs: StageCosts,
    stages_of: Sequence[Sequence[int]],
    microbatches: int,
    span: bool,
) -> float:
    """A lower bound with whole-stage work, from one without.

    Stage 0 is gathered before anything computes. Behind the last gradient of all, that of some
    stage, that stage is reduced and updated. The same holds for each rank and its stages, whose
    updates are work of the rank, and so are gathers and reductions without a lane.

    In a span, the wait for the first input does not count.

    Example:
        >>> from fpipe import Cost
        >>> costs = Cost(f=1, i=1, w=1, unshard=5, reduce_grad=7).on([0])
        >>> with_whole_stage_work(6.0, costs, [[0]], 2, span=False)
        18.0
    """
    gathers, reductions, updates = costs.unshard, costs.reduce_grad, costs.update
    ends = [reduction + update for reduction, update in zip(reductions, updates, strict=True)]
    lead = min(gathers) if span else gathers[0]
    best = lead + bound + min(ends)
    starts, _ = costs.earliest
    for stages in stages_of:
        if not stages:
            continue
        first = stages[0]  # the others need it
        begin = gathers[first] if span else max(gathers[first], gathers[0] + starts[first])
        work = microbatches * sum(costs.work[stage] for stage in stages)
        after = sum(updates[stage] for stage in stages)
        if not costs.collective_lane:
            after += sum(reductions[stage] for stage in stages)
            best = max(best, sum(gathers[stage] for stage in stages) + work + after)
        best = max(best, begin + work + max(after, min(ends[stage] for stage in stages)))
    return best
