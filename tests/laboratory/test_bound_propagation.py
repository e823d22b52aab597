"""The bound by refutation: never above the best schedule, and close where ranks take turns."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe import Cost, lower_bound, search
from fpipe.schedule.bounds.makespan import memory_limits
from fpipe.schedule.bounds.one_machine import Task, later_heads
from fpipe.schedule.bounds.propagation import refuted_bound
from fpipe.schedule.placements import linear, looped, vee
from fpipe.schedule.scaled_costs import with_times
from tests.laboratory.exhaustive import best
from tests.laboratory.test_bound_diagram import tiny_cases

# Optima that an exact solver proves, and what bounds that look at one rank or a few came to.
CASES: Final[dict[str, tuple[dict[str, Any], float, float]]] = {
    "looped": (
        {
            "placement": looped(4, 2),
            "cost": Cost(
                [11, 9, 10, 6, 12, 6, 10, 10],
                [10, 9, 7, 7, 8, 9, 7, 10],
                [4, 11, 10, 9, 10, 12, 6, 12],
                activation=[1] * 8,
            ),
            "memory": 10,
        },
        354,
        370,
    ),
    "V without a limit": (
        {
            "placement": vee(4),
            "cost": Cost(
                [10, 9, 7, 8, 12, 6, 12, 6],
                [6, 10, 11, 6, 10, 8, 11, 12],
                [6, 5, 12, 9, 8, 10, 12, 9],
                comm=1,
                activation=[1] * 8,
            ),
        },
        365,
        369,
    ),
    "linear": (
        {
            "placement": linear(4),
            "cost": Cost([9, 6, 11, 10], [11, 8, 7, 9], [8, 4, 9, 6], comm=1, activation=[1] * 4),
            "memory": 5,
        },
        189,
        190,
    ),
    "looped, by shaving": (
        {
            "placement": looped(3, 2),
            "cost": Cost(
                [51, 70, 89, 75, 68, 51],
                [60, 62, 70, 86, 100, 58],
                [76, 87, 60, 67, 45, 81],
                comm=12,
                activation=[1] * 6,
            ),
            "memory": 8,
        },
        2655,
        2664,  # 2671 is the optimum
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_together_say_more_than_one_at_a_time(name: str) -> None:
    options, before, after = CASES[name]
    assert lower_bound(microbatches=6, effort=0, **options) <= before
    assert lower_bound(microbatches=6, effort=15_000, **options) == after


def test_a_search_proves_what_it_finds() -> None:
    # Its bound was 365.
    options, _, optimum = CASES["V without a limit"]
    found = search(microbatches=6, ranks=4, iterations=1_500, **options)
    assert found.value == found.bound == optimum


def test_unequal_microbatches_share_ranks_too() -> None:
    cost = Cost([6, 5, 3], [6, 4, 2], [1, 2, 4], comm=2, sizes=[3, 1, 2], activation=[1] * 3)
    bound = lower_bound(linear(3), 3, cost, [6, 4, 4], effort=20_000)
    found = search(
        ranks=3, microbatches=3, cost=cost, memory=[6, 4, 4], placement="linear", iterations=300
    )
    assert lower_bound(linear(3), 3, cost, [6, 4, 4], effort=0) < bound <= found.value


@pytest.mark.parametrize("unit", [1e-9, 1e9])
def test_the_unit_of_time_plays_no_part(unit: float) -> None:
    options, _, optimum = CASES["linear"]
    cost = with_times(replace(options["cost"], comm=unit), unit)
    bound = lower_bound(microbatches=6, **{**options, "cost": cost}, effort=15_000)
    assert bound == pytest.approx(optimum * unit)


def test_large_cases_are_left_to_the_other_bounds() -> None:
    assert lower_bound(linear(8), 2_000, Cost(1, 1, 1), 8) == 6_007


@settings(max_examples=200)
@given(
    tasks=st.lists(
        st.tuples(st.integers(0, 8), st.integers(1, 5), st.integers(4, 20)), min_size=1, max_size=5
    )
)
def test_one_machine_loses_no_order(tasks: list[tuple[int, int, int]]) -> None:
    numbered: list[Task] = [(*task, nth) for nth, task in enumerate(tasks)]
    later = later_heads(numbered).heads
    for order in permutations(numbered):
        end, starts = 0, {}
        for head, time, deadline, nth in order:
            starts[nth] = max(head, end)
            end = starts[nth] + time
            if end > deadline:
                break
        else:
            assert later is not None
            assert all(starts[nth] >= head for nth, head in later.items())


@settings(max_examples=60)
@given(case=tiny_cases(), share=st.sampled_from([0.1, 0.8, 1.0]), unit=st.sampled_from([1, 0.3]))
def test_it_is_never_above_the_best_schedule(
    case: tuple[tuple[int, ...], int, Cost, float], share: float, unit: float
) -> None:
    placement, microbatches, cost, memory = case
    cost = with_times(cost, unit)
    truth = best(placement, microbatches, cost, memory)
    costs, alike = cost.on(placement), (1.0,) * microbatches
    limits = memory_limits(memory, placement, costs)
    bound = refuted_bound(costs, placement, limits, alike, alike, best=share * truth, effort=20_000)
    assert bound <= truth * (1 + 1e-9)
