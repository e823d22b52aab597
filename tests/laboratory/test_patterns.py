"""Patterns: periods as short as can be, in whatever memory there is."""

from __future__ import annotations

from random import Random

import pytest

import fpipe
from fpipe import Cost, search, simulate
from fpipe.schedule.orders.problem import Order, Problem, make_problem, to_schedule
from fpipe.schedule.phases.patterns import patterns
from fpipe.schedule.placements import looped, vee, waves
from tests.laboratory.phases import incumbents_of, run_alone

UNEVEN = Cost(10, 12, 8, comm=1)


def best_of(problem: Problem, iterations: int = 500) -> Order | None:
    """What patterns come to; it must be what it says."""
    incumbents = incumbents_of(problem)
    run_alone(patterns(problem, Random(0)), incumbents, iterations)
    if not incumbents.candidates:
        return None
    order = incumbents.best.order
    schedule = to_schedule(problem, order, "pattern")
    fpipe.verify(schedule)
    timeline = simulate(schedule, problem.cost)
    assert timeline.makespan == pytest.approx(order.value)
    assert max(timeline.peak) <= max(problem.memory) * (1 + 1e-9)
    return order


@pytest.mark.parametrize("memory", [2, 5])
@pytest.mark.parametrize("placement", [vee(4), looped(4, 2), waves(4, 4), vee(4)[::-1]])
def test_every_pass_along_all_ranks_can_repeat(placement: tuple[int, ...], memory: float) -> None:
    cost = Cost(10, 12, 8, comm=1, freed_by_i=0.25)
    problem = make_problem(placement, 24, cost, memory, "makespan")
    assert best_of(problem, iterations=100) is not None


def test_other_placements_have_no_patterns() -> None:
    for placement in ([0, 1, 0], [0, 1, 1, 1, 0, 0]):
        assert best_of(make_problem(placement, 8, UNEVEN, None, "makespan")) is None


def test_the_period_is_the_work_of_a_rank_where_memory_suffices() -> None:
    problems = (make_problem(vee(8), m, UNEVEN, 5, "makespan") for m in (24, 48))
    short, long = (best_of(problem, iterations=60) for problem in problems)
    assert short is not None and long is not None
    assert (long.value - short.value) / 24 == 30


def test_a_large_v_at_half_the_memory_needs_few_iterations() -> None:
    # 104,448 actions. Policies, compared on few microbatches, came to 1.2 times the bound and more.
    found = search(ranks=32, microbatches=544, cost=UNEVEN, memory=16, placement="v", iterations=20)
    assert found.gap < 0.065


def test_a_wave_of_four_stages_a_rank_is_near_its_bound() -> None:
    found = search(
        ranks=8, microbatches=16, cost=UNEVEN, memory=8, placement="wave", iterations=300
    )
    assert found.gap < 0.05
