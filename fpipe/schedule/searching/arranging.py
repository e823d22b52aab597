"""Which microbatch comes in which place, where they differ in size.

An order says what a rank does with the first microbatch it takes, the second, and so on. Any two of
them may change places, on all ranks at once: every dependency is then as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product

from fpipe.schedule.searching.evaluator import Evaluator, make_evaluator
from fpipe.schedule.searching.list_scheduler import list_schedule
from fpipe.schedule.searching.policy import known_policies
from fpipe.schedule.searching.portfolio import Phase, Step
from fpipe.schedule.searching.problem import Candidate, Order, Problem, by_size

_FEW = 4  # orders whose microbatches change places
_PLAIN = 4  # policies that are played with microbatches arranged by size
_PLAYED = 300_000  # actions of each placement, in so doing: half a second


def arrangements(candidates: Sequence[Candidate]) -> Phase:
    """Candidates with their microbatches arranged by size: the best, and those of plain policies,
    which fit whatever memory there is; of large problems few."""
    few = sorted(candidates, key=lambda candidate: candidate.value)[:_FEW]
    for problem, order in few:
        for other in arranged(make_evaluator(problem), order):
            yield Step(problem.scale, Candidate(problem, other))
    for problem in {id(own.problem): own.problem for own in candidates}.values():
        turns = (problem.turn, *map(tuple, by_size(problem.sizes, problem.turn)))
        ways = product(known_policies(problem)[:_PLAIN], turns)
        for policy, turn in islice(ways, max(2, _PLAYED // problem.actions)):
            played = list_schedule(problem, replace(policy, turn=turn))
            yield Step(problem.scale, None if played is None else Candidate(problem, played))


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
