"""The best of all schedules of a tiny case, by trying every one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fpipe import Cost
from fpipe.schedule.stage_costs import StageCosts


class State(NamedTuple):
    """A schedule half made. Work: per stage and microbatch, 0 to 3 as F, I, W (or B) are done."""

    work: tuple[tuple[int, ...], ...]
    arrivals: tuple[tuple[float, ...], ...]  # of what each stage and microbatch waits for
    free: tuple[float, ...]
    first: tuple[float, ...]  # start of each rank's first action
    held: tuple[float, ...]


def best(
    placement: tuple[int, ...], microbatches: int, cost: Cost, memory: float, *, span: bool = False
) -> float:
    """The least makespan (or span) over all orders of all ranks, each action as early as can be."""
    costs = cost.on(placement)
    ranks, stages = max(placement) + 1, len(placement)
    start = State(
        work=((0,) * microbatches,) * stages,
        arrivals=((0.0,) * microbatches, *((float("inf"),) * microbatches,) * (stages - 1)),
        free=(0.0,) * ranks,
        first=(float("inf"),) * ranks,
        held=(0.0,) * ranks,
    )
    found = float("inf")
    seen: set[tuple[State, float]] = set()
    todo = [(start, 0.0)]
    while todo:
        state, now = todo.pop()
        value = _value(state, placement, costs, span)
        if value >= found or (state, now) in seen:
            continue
        seen.add((state, now))
        if all(done == 3 for row in state.work for done in row):
            found = value
        # In order of their starts: every schedule is made once, up to ties. The earliest is tried
        # first, which soon finds a good schedule.
        steps = [pair for pair in _steps(state, placement, costs, memory) if pair[1] >= now]
        todo += sorted(steps, key=lambda pair: -pair[1])
    return found


def _value(state: State, placement: tuple[int, ...], costs: StageCosts, span: bool) -> float:
    """The time of a schedule at least: that of a rank until now, and of the work that it has."""
    ends = list(state.free)
    for stage, row in enumerate(state.work):
        backward = min(costs.i[stage] + costs.w[stage], costs.b[stage])
        left = (costs.f[stage] + backward, backward, costs.w[stage], 0.0)
        ends[placement[stage]] += sum(left[done] for done in row)
    return max(
        end - (min(first, free) if span else 0)
        for end, free, first in zip(ends, state.free, state.first, strict=True)
    )


def _steps(
    state: State, placement: tuple[int, ...], costs: StageCosts, memory: float
) -> Iterator[tuple[State, float]]:
    for stage, row in enumerate(state.work):
        rank = placement[stage]
        for microbatch, done in enumerate(row):
            if done == 0 and stage == 0 and 0 in row[:microbatch]:
                continue  # microbatches are alike: stage 0 takes them in order
            kept, freed = costs.activation[stage], costs.freed_by_i[stage]
            if done == 3 or state.arrivals[stage][microbatch] == float("inf"):
                continue
            choices = {
                0: [(costs.f[stage], 1, kept)],
                1: [(costs.i[stage], 2, -freed), (costs.b[stage], 3, -kept)],
                2: [(costs.w[stage], 3, freed - kept)],
            }
            for duration, after, change in choices[done]:
                if change > 0 and state.held[rank] + change > memory + 1e-9:
                    continue
                begin = max(state.free[rank], state.arrivals[stage][microbatch])
                yield (
                    _after(
                        state, placement, costs, (stage, microbatch), begin, duration, after, change
                    ),
                    begin,
                )


def _after(
    state: State,
    placement: tuple[int, ...],
    costs: StageCosts,
    where: tuple[int, int],
    begin: float,
    duration: float,
    after: int,
    change: float,
) -> State:
    stage, microbatch = where
    rank, end = placement[stage], begin + duration
    before = state.work[stage][microbatch]
    work = [list(row) for row in state.work]
    arrivals = [list(row) for row in state.arrivals]
    free, first, held = list(state.free), list(state.first), list(state.held)
    work[stage][microbatch] = after
    free[rank], held[rank] = end, round(held[rank] + change, 9)
    first[rank] = min(first[rank], begin)
    arrivals[stage][microbatch] = float("inf") if before == 0 else 0.0
    if before == 0 and stage + 1 < len(work):
        arrivals[stage + 1][microbatch] = end + costs.down[stage]
    elif before == 0:
        arrivals[stage][microbatch] = end
    elif before == 1 and stage:
        arrivals[stage - 1][microbatch] = end + costs.up[stage - 1]
    return State(
        tuple(map(tuple, work)),
        tuple(map(tuple, arrivals)),
        tuple(free),
        tuple(first),
        tuple(held),
    )
