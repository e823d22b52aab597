"""Simulated annealing on orders: move actions that the makespan waits for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from typing import Final

from fpipe.schedule.searching.evaluator import Evaluator
from fpipe.schedule.searching.list_scheduler import list_schedule
from fpipe.schedule.searching.moves import moved
from fpipe.schedule.searching.policy import random_policy
from fpipe.schedule.searching.portfolio import Phase, Standing, Step
from fpipe.schedule.searching.problem import Candidate, Order

_MOVES: Final = 2_000  # of the first cycles
_SLOWER: Final = 4  # so many cycles later they are longer by as much
_BATCH: Final = 50  # moves of a step
_COST: Final = 0.015  # of a move, in iterations
_HEATS: Final = (0.5, 1.0, 2.0)  # by how much an order may get worse at first, in mean times
_COLD: Final = 0.05  # of the heat that is left in the end


def annealings(
    evaluators: Mapping[tuple[int, ...], Evaluator], standing: Standing, random: Random
) -> Phase:
    """Cycle after cycle of annealing: of the best order, of others among the best, of new ones.

    Args:
        evaluators: by placement, of what is to be scheduled.
        standing: where to find orders to start from.
        random: of all choices.
    """
    nth = 0
    while True:
        open_to = [
            each
            for each in standing.candidates
            if each.problem.placement in evaluators and not standing.hopeless(each.problem)
        ]
        if not open_to:
            yield Step(0.0)
            continue
        problem, order = open_to[0]
        if nth % 4 == 1:
            problem, order = open_to[min(int(random.expovariate(0.3)), len(open_to) - 1)]
        elif nth % 4 == 3:
            played = list_schedule(problem, random_policy(random, problem))
            order = played or order
            yield Step(1.0)
        evaluator = evaluators[problem.placement]
        heat = random.choice(_HEATS) * math.sqrt(min(1.0, 150 / problem.actions))
        moves = _MOVES * (1 + nth // _SLOWER)
        yield from anneal(evaluator, order, random, moves, heat)
        nth += 1


def anneal(
    evaluator: Evaluator, order: Order, random: Random, moves: int, heat: float = 0.0
) -> Phase:
    """Improve an order by moves of actions of its critical path; better ones are found on the way.

    Args:
        evaluator: of the problem.
        order: where to start.
        random: of all choices.
        moves: to try.
        heat: how much worse an order may get at first, in mean times of an action.
    """
    problem = evaluator.problem
    value, ends = evaluator.times(order.rows, order.fused)
    best = current = Order(value, order.rows, order.fused)
    path = evaluator.critical(current, ends)
    warmth = heat * problem.mean_time
    cooling = _COLD ** (1 / moves)
    cost = _COST * problem.scale
    for nth in range(1, moves + 1):
        warmth *= cooling
        move = moved(evaluator, current, random.choice(path), random)
        # The draw comes first, so that the evaluation can stop once it is sure to be refused.
        allowed = current.value - warmth * math.log(1 - random.random()) + problem.slack
        if move is not None:
            limit = math.inf if problem.objective == "span" else allowed
            value, ends = evaluator.times(move.rows, move.fused, limit)
            if value <= allowed:
                current = Order(value, move.rows, move.fused)
                path = evaluator.critical(current, ends)
                if value < best.value * (1 - 1e-12):
                    best = current
                    yield Step(0.0, Candidate(problem, best))
        if nth % _BATCH == 0:
            yield Step(cost * _BATCH)
