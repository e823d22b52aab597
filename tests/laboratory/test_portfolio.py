"""The portfolio: a search is the beginning of any longer one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from fpipe import Cost, search
from fpipe.schedule.orders.problem import Candidate, Order, make_problem
from fpipe.schedule.phases.portfolio import Entry, Incumbents, Meter, Step, run
from fpipe.schedule.placements import vee

PROBLEM = make_problem([0], 1, Cost(1, 1, 1), None, "makespan")


def of_value(value: float) -> Candidate:
    return Candidate(PROBLEM, Order(value, [], frozenset()))


@pytest.mark.parametrize(
    "options",
    [
        {
            "ranks": 3,
            "microbatches": 5,
            "cost": Cost(3, 4, 2, comm=2),
            "memory": 2,
            "placement": "v",
            "seed": 1,
        },
        {
            "ranks": 2,
            "microbatches": 4,
            "cost": Cost(2, 3, 1, comm=1, sizes=[3, 1, 2, 1]),
            "memory": 5,
        },
        {
            "ranks": 3,
            "microbatches": 6,
            "cost": Cost(4, 5, 3, b=6),
            "objective": "span",
            "memory": 3,
        },
        {"ranks": 4, "microbatches": 60, "cost": Cost(10, 12, 8, comm=2), "memory": 2},
    ],
)
def test_more_iterations_never_give_a_worse_answer(options: dict[str, Any]) -> None:
    # What a phase did depended on how much of the whole budget was left: 112, then 113.
    values, bounds = [], []
    for iterations in (0, 1, 20, 100):
        found = search(iterations=iterations, **options)
        values.append(found.value)
        bounds.append(found.bound)
    assert values == sorted(values, reverse=True)
    assert bounds == sorted(bounds)


def test_phases_share_the_work_by_its_cost() -> None:
    taken: list[str] = []

    def phase(name: str, cost: float) -> Iterator[Step]:
        while True:
            taken.append(name)
            yield Step(cost)

    incumbents, meter = Incumbents(bounds={(0,): 0.0}), Meter(0, 30)
    run([Entry(2.0, phase("a", 1.0)), Entry(1.0, phase("b", 2.0))], incumbents, meter)
    assert meter.spent == 30
    assert (taken.count("a"), taken.count("b")) == (20, 5)
    again, begun = Meter(0, 12), taken.copy()
    taken.clear()
    run([Entry(2.0, phase("a", 1.0)), Entry(1.0, phase("b", 2.0))], incumbents, again)
    assert taken == begun[: len(taken)]


def test_the_first_of_equals_stays_the_best() -> None:
    incumbents = Incumbents(bounds={(0,): 1.0})
    first, other = of_value(3.0), of_value(3.0)
    for candidate in (of_value(5.0), first, other, of_value(4.0)):
        incumbents.offer(candidate)
    assert incumbents.best is first
    assert [each.value for each in incumbents.candidates] == [3, 4, 5]
    assert not incumbents.solved
    incumbents.raise_bound(PROBLEM, 3.0)
    assert incumbents.solved and incumbents.hopeless(PROBLEM)


def test_a_search_by_the_clock_takes_the_time_that_it_is_given() -> None:
    begun = time.thread_time()
    found = search(
        ranks=6,
        microbatches=24,
        cost=Cost(10, 12, 8, comm=5),
        memory=3,
        placement=vee(6),
        seconds=1,
    )
    assert found.gap > 0
    assert 0.8 <= time.thread_time() - begun <= 1.2
