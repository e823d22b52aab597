"""Tightening: move every action into the first gap that it fits, and W's to where ranks wait.

An order that repeats a pattern wastes time where it fills and drains: it keeps the gaps of the
steady state, though no action needs them there. "Pipeline Parallelism with
Controllable Memory" (Qi et al., https://arxiv.org/abs/2405.15362) moves actions of equal length
into free slots of its pattern. This does the same to any order, with the times of the actions, as
long as it helps.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from fpipe.schedule.bounds.states import GRADIENT, WEIGHT
from fpipe.schedule.orders.evaluator import Evaluator
from fpipe.schedule.orders.problem import Candidate, Order
from fpipe.schedule.phases.portfolio import Phase, Step

# The share of a weight gradient that must fit into a wait, for it to run there.
_SHARES: Final = (1.0, 0.5, 0.01, 2.0)
_PATIENCE: Final = 3  # rounds without a better value
_COST: Final = 2.0  # of a round, in evaluations
_NONE: Final[frozenset[int]] = frozenset()


def tighten(evaluator: Evaluator, order: Order) -> Phase:
    """Tighten an order round by round, until that brings nothing; each step is a round."""
    best, fused, problem = order.value, order.fused, evaluator.problem
    if problem.costs.entangled:
        return  # it moves one action at a time, and knows nothing of what that does to others
    tables = evaluator.with_fused(fused)
    for share in _SHARES:
        rows, fruitless = order.rows, 0
        while fruitless < _PATIENCE:
            rows = _delay_weights(tables, _move_earlier(tables, rows), fused, share)
            value, _ = tables.times(rows, _NONE)
            fruitless += 1
            candidate = None
            if value < best * (1 - 1e-12):
                best, fruitless = value, 0
                candidate = Candidate(problem, Order(value, rows, fused))
            yield Step(_COST * problem.scale, candidate)
            if problem.solved(best):
                return


def _move_earlier(evaluator: Evaluator, rows: list[list[int]]) -> list[list[int]]:
    """Move each action, first to last, into the first gap of its rank after its input has arrived
    that is long enough, if the memory allows."""
    duration, change, problem = evaluator.duration, evaluator.change, evaluator.problem
    slack = problem.slack
    rows = [row.copy() for row in rows]
    _, ends = evaluator.times(rows, _NONE)
    starts = [end - time for end, time in zip(ends, duration, strict=True)]
    # Per rank, how many actions at its front are settled, and the memory after them.
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
        gap = None
        for at in range(here, least - 1, -1):
            free = ends[row[at - 1]] if at else 0.0
            start = max(free, ready)
            if start + duration[action] <= (starts[row[at]] if at < here else ends[action]) + slack:
                gap = at, start
            if free <= ready:
                break
        if gap is not None and gap[1] < starts[action] - slack:
            at, start = gap
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


def _delay_weights(
    evaluator: Evaluator, rows: list[list[int]], fused: AbstractSet[int], share: float
) -> list[list[int]]:
    """Keep the order of forwards and input gradients. A weight gradient runs where this share of it
    fits into a wait, or where only it makes room for the next action, oldest first, or at the
    end."""
    duration, change, source = evaluator.duration, evaluator.change, evaluator.source
    problem = evaluator.problem
    count, memory = problem.microbatches, problem.memory
    todo = [[action for action in row if action // count % 3 != WEIGHT] for row in rows]
    result: list[list[int]] = [[] for _ in rows]
    owed: list[list[int]] = [[] for _ in rows]  # weight gradients, the oldest last
    ends: dict[int, float] = {}
    clocks, places, held = [0.0] * len(rows), [0] * len(rows), [0.0] * len(rows)

    def run(rank: int, action: int, start: float) -> None:
        clocks[rank] = ends[action] = start + duration[action]
        held[rank] += change[action]
        result[rank].append(action)

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
            while late and clocks[rank] + share * duration[late[-1]] <= arrival:
                run(rank, late.pop(), clocks[rank])
            while late and change[action] > 0 and held[rank] + change[action] > most:
                run(rank, late.pop(), clocks[rank])
            run(rank, action, max(clocks[rank], arrival))
            if action // count % 3 == GRADIENT and action not in fused:
                late.insert(0, action + (WEIGHT - GRADIENT) * count)
            places[rank] += 1
            if action in waiting:
                ready.append(waiting.pop(action))
    return [[*done, *reversed(late)] for done, late in zip(result, owed, strict=True)]
