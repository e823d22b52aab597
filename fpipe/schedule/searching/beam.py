"""Beam search: all ways to go on, as far as they promise most. Where memory is scarce, all."""

from __future__ import annotations

from dataclasses import replace
from heapq import nsmallest
from typing import TypeAlias

from fpipe.schedule.bounds.diagram import undominated
from fpipe.schedule.bounds.part import Part, part_of
from fpipe.schedule.bounds.steps import (
    Counts,
    State,
    Step,
    after,
    beginning,
    counted,
    possible,
    work_left,
)
from fpipe.schedule.searching.budget import Budget
from fpipe.schedule.searching.evaluator import make_evaluator
from fpipe.schedule.searching.problem import GRADIENT, WEIGHT, Order, Problem

_WIDTHS = (8, 32, 128, 512, 2048, 8192)
_PATIENCE = 3  # beams that find nothing better, before the rest of the budget is left to others
_COST = 0.05  # of a state, in evaluations

Trail: TypeAlias = tuple["Trail", Step] | None  # the steps up to here, last first
Scored: TypeAlias = tuple[tuple[float, float], Counts, State, Trail]


def beam(problem: Problem, best: float, budget: Budget) -> Order | None:
    """The best order that beams of growing width find, if it is better than `best`.

    It goes through the states of all ranks as the bound does (see `bounds.diagram`), but where that
    merges what is too much, this keeps the states in which the ranks will be done soonest, all
    together, if none waits any more. A beam that nothing falls out of has found the best schedule
    of its kind: of halves, or, where an I hands on more than it frees, of full backwards.

    Args:
        problem: what to schedule.
        best: the value that is known already.
        budget: what the beams may use.
    """
    kinds = [_Kind(problem, fused) for fused in ((False, True) if problem.grows else (False,))]
    evaluator = make_evaluator(problem)
    found: Order | None = None
    fruitless = 0
    for width in _WIDTHS:
        fruitless += 1
        for kind in kinds.copy():
            limit = best if problem.objective == "makespan" else float("inf")
            trail, whole = _walk(kind.part, problem.microbatches, width, limit, budget)
            if whole:
                kinds.remove(kind)
            if trail is not None:
                rows, fused = kind.rows(trail, problem.microbatches)
                value, _ = evaluator.times(rows, fused)
                if value < best:
                    best, found, fruitless = value, Order(value, rows, fused), 0
        if not kinds or budget.over or problem.solved(best) or fruitless == _PATIENCE:
            break
    return found


class _Kind:
    """Schedules of halves alone, or of full backwards alone: each knows what a rank holds by how
    much of everything it has done."""

    def __init__(self, problem: Problem, fused: bool) -> None:
        costs = problem.costs
        if fused:
            nothing = (0.0,) * len(costs.w)
            costs = replace(costs, i=costs.b, w=nothing, freed_by_i=costs.activation)
        elif problem.grows:
            # F is charged for what I hands on: so there is no dead end.
            pairs = list(zip(costs.activation, costs.freed_by_i, strict=True))
            costs = replace(
                costs,
                activation=tuple(max(kept, kept - freed) for kept, freed in pairs),
                freed_by_i=tuple(max(0.0, freed) for _, freed in pairs),
            )
        self.fused = fused
        self.part = part_of(costs, problem.placement, problem.memory, range(problem.ranks))

    def rows(self, trail: Trail, microbatches: int) -> tuple[list[list[int]], frozenset[int]]:
        """A row of actions per rank, as the search numbers them, and those that are fused."""
        steps: list[Step] = []
        while trail is not None:
            trail, step = trail
            steps.append(step)
        rows: list[list[int]] = [[] for _ in self.part.memory]
        done = [[0] * len(self.part.stages) for _ in range(3)]
        fused = set()
        for kind, at in reversed(steps):
            number = (at * 3 + kind) * microbatches + done[kind][at]
            done[kind][at] += 1
            if kind == WEIGHT and self.fused:
                continue
            if kind == GRADIENT and self.fused:
                fused.add(number)
            rows[self.part.rank_of[at]].append(number)
        return rows, frozenset(fused)


def _walk(
    part: Part, microbatches: int, width: int, limit: float, budget: Budget
) -> tuple[Trail, bool]:
    """One beam: the trail of its best end below `limit`, and whether nothing fell out of it."""
    counts, state = beginning(part)
    layer: dict[Counts, dict[State, Trail]] = {counts: {state: None}}
    whole = True
    for _ in range(3 * len(part.stages) * microbatches):
        found: dict[Counts, dict[State, Trail]] = {}
        for counts, states in layer.items():
            steps = possible(part, counts, microbatches)
            targets = {step: found.setdefault(counted(counts, step), {}) for step in steps}
            final = counts[1][0] == microbatches - 1
            budget.spend(_COST * len(states))
            for state, trail in states.items():
                for step, following in after(part, state, steps, final):
                    targets[step].setdefault(following, (trail, step))
        if budget.over:
            return None, False
        scored: list[Scored] = []
        for counts, reached in found.items():
            left = work_left(part, counts, microbatches)
            for state in undominated(reached):
                done = [clock + rest for clock, rest in zip(state.clocks, left, strict=True)]
                last = max(*done, state.end)
                if last < limit * (1 - 1e-12):
                    scored.append(((sum(done), last), counts, state, reached[state]))
        if len(scored) > width:
            whole = False
            scored = nsmallest(width, scored, key=lambda one: one[0])
        layer = {}
        for _, counts, state, trail in scored:
            layer.setdefault(counts, {})[state] = trail
    ends = [
        (max(*state.clocks, state.end), trail)
        for states in layer.values()
        for state, trail in states.items()
    ]
    return (min(ends, key=lambda end: end[0])[1] if ends else None), whole
