"""Windows: what branch and bound orders anew keeps the rules, and is better."""

from __future__ import annotations

from random import Random

import pytest

import fpipe
from fpipe import Cost, search, simulate
from fpipe.schedule.orders.evaluator import make_evaluator
from fpipe.schedule.orders.list_scheduler import list_schedule, plain_policy
from fpipe.schedule.orders.problem import Order, make_problem, to_schedule
from fpipe.schedule.phases.annealing import anneal
from fpipe.schedule.phases.breeding import random_policy
from fpipe.schedule.phases.windows import reorder_windows
from fpipe.schedule.placements import linear, looped, vee
from tests.laboratory.phases import last_found

UNEVEN = Cost(10, 12, 8, comm=1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("b", [None, 17])
@pytest.mark.parametrize("placement", [linear(4), looped(4, 2), vee(4)])
def test_an_order_gets_better_within_the_rules(
    placement: tuple[int, ...], b: float | None, seed: int
) -> None:
    cost = Cost(10, 12, 8, b=b, comm=3, freed_by_i=0.2)
    problem, random = make_problem(placement, 10, cost, 3, "makespan"), Random(seed)
    order = list_schedule(problem, random_policy(random, problem))
    assert order is not None
    better = last_found(reorder_windows(make_evaluator(problem), order), order)
    assert better.value <= order.value
    schedule = to_schedule(problem, better, "windows")
    fpipe.verify(schedule)
    timeline = simulate(schedule, cost)
    assert timeline.makespan == pytest.approx(better.value)
    assert max(timeline.peak) <= 3 * (1 + 1e-9)


def test_a_window_finds_what_moves_one_at_a_time_do_not() -> None:
    # Annealing, which moves one action at a time, stays above what windows find at once.
    cost = Cost(
        [5.3, 4.1, 6.2, 5.9, 4.6, 5.1, 5.5, 4.9],
        [6.6, 5.2, 5.7, 7.1, 6.4, 5.5, 6.0, 6.9],
        4,
        comm=1,
    )
    problem = make_problem(vee(4), 16, cost, 3, "makespan")
    evaluator = make_evaluator(problem)
    start = list_schedule(problem, plain_policy(8))
    assert start is not None
    annealed = last_found(anneal(evaluator, start, Random(0), 4_000), start)
    better = last_found(reorder_windows(evaluator, annealed), annealed)
    assert better.value < annealed.value < start.value


def test_one_rank_gets_its_best_order() -> None:
    # All in the worst order: W's come before the I's that others wait for.
    problem = make_problem(linear(2), 3, Cost(1, 1, 1), None, "makespan")
    count = problem.microbatches
    rows = [[*range(3 * count)], [action + 3 * count for action in (0, 1, 2, 3, 6, 4, 7, 5, 8)]]
    evaluator = make_evaluator(problem)
    value, _ = evaluator.times(rows, frozenset())
    order = Order(value, rows, frozenset())
    assert value > 10
    assert last_found(reorder_windows(evaluator, order), order).value == 10


def test_spans_are_left_alone() -> None:
    problem = make_problem(vee(4), 8, UNEVEN, 3, "span")
    order = list_schedule(problem, plain_policy(8))
    assert order is not None
    assert list(reorder_windows(make_evaluator(problem), order)) == []


def test_the_search_makes_use_of_them() -> None:
    # 422.9 without windows, in as many iterations.
    cost = Cost([8.4, 7.6, 9.4, 7.9], [8.9, 11.3, 15.0, 14.2], [9.3, 6.7, 8.2, 6.9], comm=1)
    found = search(
        ranks=4, microbatches=12, cost=cost, memory=4, placement=linear(4), iterations=150
    )
    assert found.value < 416
