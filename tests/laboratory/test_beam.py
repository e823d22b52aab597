"""The beam: the best of all schedules where states are few, and good ones where they are many."""

from __future__ import annotations

from random import Random

import pytest

import fpipe
from fpipe import Cost, search, simulate
from fpipe.schedule.bounds.makespan import Objective
from fpipe.schedule.orders.evaluator import make_evaluator
from fpipe.schedule.orders.problem import (
    Candidate,
    Order,
    Problem,
    make_problem,
    to_schedule,
)
from fpipe.schedule.phases.beam import beams
from fpipe.schedule.placements import linear, looped, vee
from tests.laboratory.phases import incumbents_of, run_alone

UNEVEN = Cost(10, 12, 8, comm=1)


def found(problem: Problem, best: float = float("inf"), iterations: int = 2_000) -> Order | None:
    """What beams find that is better than `best`; it must be what it says."""
    incumbents = incumbents_of(problem)
    if best < float("inf"):
        incumbents.offer(Candidate(problem, Order(best, [], frozenset())))
    phase = beams(make_evaluator(problem), incumbents, Random(0))
    run_alone(phase, incumbents, iterations)
    order = incumbents.best.order if incumbents.value < best else None
    if order is not None:
        schedule = to_schedule(problem, order, "beam")
        fpipe.verify(schedule)
        timeline = simulate(schedule, problem.cost)
        value = timeline.makespan if problem.objective == "makespan" else timeline.span
        assert value == pytest.approx(order.value)
        assert all(
            peak <= limit + 1e-9 for peak, limit in zip(timeline.peak, problem.memory, strict=True)
        )
    return order


@pytest.mark.parametrize(
    ("placement", "memory", "least"),
    [(vee(2), 1, 267), (vee(2), 1.5, 212), (looped(2, 2), 1, 269), (linear(4), 2, 342)],
)
def test_it_finds_the_best_where_memory_is_scarce(
    placement: tuple[int, ...], memory: float, least: float
) -> None:
    problem = make_problem(placement, 6, UNEVEN, memory, "makespan")
    order = found(problem)
    assert order is not None and order.value == least
    # Nothing fell out of the beam, so nothing is better; the bound says the same on its own.
    assert problem.examined(20_000).bound == pytest.approx(least)
    assert found(problem, best=least) is None


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_what_falls_out_of_it_leaves_a_schedule(objective: Objective) -> None:
    cost = Cost(10, 12, 8, comm=1, b=17, freed_by_i=0.2)
    assert found(make_problem(vee(4), 12, cost, 3, objective), iterations=300) is not None


def test_it_finds_nothing_without_a_budget() -> None:
    assert found(make_problem(vee(4), 12, UNEVEN, 4, "makespan"), iterations=1) is None


def test_the_search_proves_that_it_found_the_best() -> None:
    # Policies and annealing got no further than 226, and the formulas no higher than 200.
    result = search(
        ranks=2, microbatches=6, cost=UNEVEN, memory=1.5, placement=vee(2), iterations=300
    )
    assert (result.value, result.gap) == (212, 0)
