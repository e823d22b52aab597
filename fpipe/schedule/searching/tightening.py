"""Tightening: every action into the first gap that it fits, and weight gradients where others wait.

An order that repeats a pattern wastes time where it fills and drains: the gaps there are as in the
steady state, though nobody needs them. "Pipeline Parallelism with Controllable Memory" (Qi et al.,
https://arxiv.org/abs/2405.15362) moves actions of equal length into free slots of its pattern
before it runs it. Here the same is done to any order, in the time that actions take, as long as it
helps.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final

from fpipe.schedule.bounds.states import GRADIENT, WEIGHT
from fpipe.schedule.searching.evaluator import Evaluator
from fpipe.schedule.searching.portfolio import Phase, Standing, Step
from fpipe.schedule.searching.problem import Candidate, Order

# How much of a weight gradient must fit into a wait, for it to run there.
_PARTS: Final = (1.0, 0.5, 0.01, 2.0)
_PATIENCE: Final = 3  # rounds that bring nothing
_COST: Final = 2.0  # of a round, in evaluations
_NONE: Final[frozenset[int]] = frozenset()


def tightening(evaluators: Mapping[tuple[int, ...], Evaluator], standing: Standing) -> Phase:
    """Tighten the candidates, the best first, and those that others find later.

    Args:
        evaluators: by placement, of what is to be scheduled.
        standing: where the candidates stand.
    """
    seen: dict[int, Order] = {}  # by identity, which lasts as long as they are kept
    begun: list[Phase] = []  # the last on top
    while True:
        for problem, order in standing.candidates:
            if id(order) not in seen and problem.placement in evaluators:
                # The best is first, and whatever was begun goes on after it.
                if not begun or order is standing.best.order:
                    seen[id(order)] = order
                    begun.append(tighten(evaluators[problem.placement], order))
                break
        step = next(begun[-1], None) if begun else Step(0.0)
        if step is None:
            begun.pop()
            continue
        if step.found is not None:
            seen[id(step.found.order)] = step.found.order
        yield step


def tighten(evaluator: Evaluator, order: Order) -> Phase:
    """Tighten an order round by round, until that brings nothing; each step is a round.

    Args:
        evaluator: of the problem.
        order: where to start.
    """
    best, fused, problem = order.value, order.fused, evaluator.problem
    # In which what is fused costs what it does.
    tables = replace(
        evaluator, duration=evaluator.durations(fused), change=evaluator.changes(fused)
    )
    for part in _PARTS:
        rows, fruitless = order.rows, 0
        while fruitless < _PATIENCE:
            rows = _lazily(tables, _sooner(tables, rows), fused, part)
            value, _ = tables.times(rows, _NONE)
            fruitless += 1
            found = None
            if value < best * (1 - 1e-12):
                best, fruitless = value, 0
                found = Candidate(problem, Order(value, rows, fused))
            yield Step(_COST * problem.scale, found)
            if problem.solved(best):
                return


def _sooner(evaluator: Evaluator, rows: list[list[int]]) -> list[list[int]]:
    """Each action, first to last, in the first gap of its rank after its input has arrived that is
    long enough, if the memory allows."""
    duration, change, problem = evaluator.duration, evaluator.change, evaluator.problem
    slack = problem.slack
    rows = [row.copy() for row in rows]
    _, ends = evaluator.times(rows, _NONE)
    starts = [end - time for end, time in zip(ends, duration, strict=True)]
    # Of each rank, those that have had their turn stand first, and hold so much in the end.
    done, held = [0] * len(rows), [0.0] * len(rows)
    for action in sorted((action for row in rows for action in row), key=starts.__getitem__):
        rank = problem.placement[action // (3 * problem.microbatches)]
        here, before = done[rank], held[rank]
        done[rank] += 1
        held[rank] += change[action]
        source = evaluator.source[action]
        ready = ends[source] + evaluator.delay[action] if source >= 0 else 0.0
        if ready >= starts[action] - slack:
            continue
        row = rows[rank]
        least = _first_that_fits(evaluator, rank, row, here, before) if change[action] > 0 else 0
        found = None
        for at in range(here, least - 1, -1):
            free = ends[row[at - 1]] if at else 0.0
            start = max(free, ready)
            if start + duration[action] <= (starts[row[at]] if at < here else ends[action]) + slack:
                found = at, start
            if free <= ready:
                break
        if found is not None and found[1] < starts[action] - slack:
            at, start = found
            row.insert(at, row.pop(here))
            starts[action], ends[action] = start, start + duration[action]
    return rows


def _first_that_fits(
    evaluator: Evaluator, rank: int, row: list[int], here: int, held: float
) -> int:
    """The first place to which the memory allows the action at `here` to move, before which the
    rank holds `held`."""
    change, most = evaluator.change, evaluator.problem.memory[rank] * (1 + 1e-9)
    at = here
    while at and held + change[row[here]] <= most:
        at -= 1
        held -= change[row[at]]
    # The loop ends one place too far where it was the memory that ended it.
    return at if held + change[row[here]] <= most else at + 1


def _lazily(
    evaluator: Evaluator, rows: list[list[int]], fused: AbstractSet[int], part: float
) -> list[list[int]]:
    """The same order of forwards and input gradients; a weight gradient runs where so much of it
    fits into a wait, or where only it makes room for what comes next, oldest first, or at the
    end."""
    duration, change, source = evaluator.duration, evaluator.change, evaluator.source
    problem = evaluator.problem
    count, memory = problem.microbatches, problem.memory
    todo = [[action for action in row if action // count % 3 != WEIGHT] for row in rows]
    made: list[list[int]] = [[] for _ in rows]
    owed: list[list[int]] = [[] for _ in rows]  # weight gradients, the oldest last
    ends: dict[int, float] = {}
    clocks, places, held = [0.0] * len(rows), [0] * len(rows), [0.0] * len(rows)

    def run(rank: int, action: int, start: float) -> None:
        clocks[rank] = ends[action] = start + duration[action]
        held[rank] += change[action]
        made[rank].append(action)

    waiting: dict[int, int] = {}
    ready = list(range(len(rows)))
    while ready:
        rank = ready.pop()
        late, most = owed[rank], memory[rank] * (1 + 1e-9)
        for at in range(places[rank], len(todo[rank])):
            action = todo[rank][at]
            arrival = 0.0
            if (needed := source[action]) >= 0:
                if needed not in ends:
                    waiting[needed] = rank
                    break
                arrival = ends[needed] + evaluator.delay[action]
            while late and clocks[rank] + part * duration[late[-1]] <= arrival:
                run(rank, late.pop(), clocks[rank])
            while late and change[action] > 0 and held[rank] + change[action] > most:
                run(rank, late.pop(), clocks[rank])
            run(rank, action, max(clocks[rank], arrival))
            if action // count % 3 == GRADIENT and action not in fused:
                late.insert(0, action + (WEIGHT - GRADIENT) * count)
            places[rank] += 1
            if action in waiting:
                ready.append(waiting.pop(action))
    return [[*done, *reversed(late)] for done, late in zip(made, owed, strict=True)]
