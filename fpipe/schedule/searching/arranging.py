"""Which microbatch comes in which place, where they differ in size.

An order says what a rank does with the first microbatch it takes, the second, and so on. Any two of
them may change places, on all ranks at once: every dependency is then as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from fpipe.schedule.searching.budget import Budget
from fpipe.schedule.searching.evaluator import Evaluator
from fpipe.schedule.searching.problem import Order, Problem, by_size

_PATIENCE = 4  # exchanges that bring nothing, for each pair, before it ends


def turn_of(problem: Problem, order: Order) -> tuple[int, ...]:
    """The microbatches as the first stage takes them."""
    count = problem.microbatches
    return tuple(action for action in order.rows[problem.placement[0]] if action < count)


def arranged(evaluator: Evaluator, order: Order) -> Iterator[Order]:
    """An order with its microbatches arranged by size, where that fits the memory.

    Args:
        evaluator: of the problem.
        order: as it is.
    """
    problem = evaluator.problem
    turn = turn_of(problem, order)
    for chosen in by_size(problem.sizes, turn):
        own = renamed(problem, order, dict(zip(turn, chosen, strict=True)))
        if (found := valued(evaluator, own)) is not None:
            yield found


def exchanged(evaluator: Evaluator, order: Order, random: Random, budget: Budget) -> Order:
    """An order bettered by exchanges of two microbatches, until none helps or the budget is spent.

    Returns:
        The best order met, `order` itself if none was better.
    """
    problem = evaluator.problem
    count, fruitless = problem.microbatches, 0
    while not budget.over and not problem.solved(order.value):
        first, second = random.randrange(count), random.randrange(count)
        if problem.sizes[first] == problem.sizes[second]:
            budget.spend(0.02)
            continue
        budget.spend()
        found = valued(evaluator, renamed(problem, order, {first: second, second: first}))
        if found is not None and found.value < order.value * (1 - 1e-12):
            order, fruitless = found, 0
        fruitless += 1
        if fruitless > _PATIENCE * count * count:
            break
    return order


def renamed(problem: Problem, order: Order, names: dict[int, int]) -> Order:
    """An order with other microbatches in the places of some, and no value yet."""
    count = problem.microbatches
    own = [names.get(microbatch, microbatch) for microbatch in range(count)]
    kinds = range(0, 3 * len(problem.placement) * count, count)
    table = [first + other for first in kinds for other in own]
    rows = [[table[action] for action in row] for row in order.rows]
    return Order(float("inf"), rows, frozenset(table[action] for action in order.fused))


def valued(evaluator: Evaluator, order: Order) -> Order | None:
    """The order with its value, or None where it does not fit the memory."""
    if not evaluator.fits_all(order):
        return None
    value, _ = evaluator.times(order.rows, order.fused)
    return replace(order, value=value)
