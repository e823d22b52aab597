"""The choice of the stages that compute again, together with the order."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from fpipe import Cost, ScheduleError, search, simulate
from tests.laboratory.exhaustive import best

CASES: list[tuple[list[int], float]] = [([0, 1], 1.2), ([0, 1], 2.0), ([0, 1, 0], 1.3)]


def test_a_stage_that_computes_again_takes_longer_and_keeps_less() -> None:
    cost = Cost(f=2, i=3, w=1, b=5, activation=4, freed_by_i=1, kept=1)
    again = cost.with_remat(["none", "full"], [0, 1])
    assert (again.f, again.i, again.w, again.b) == ((2, 2), (3, 5), (1, 1), (5, 7))
    assert again.activation == (4, 1)
    # What W reads is there after I in either case: 3 of 4.
    assert again.freed_by_i == (1, -2)
    assert (again.recompute, again.kept) == (None, None)
    assert cost.with_remat("none", [0, 1]).on([0, 1]) == cost.on([0, 1])
    longer = replace(cost, recompute=(4, 8, 4, 4), b=None).with_remat("full", [0, 1, 1, 0])
    assert longer.i == (5.5, 9.5, 5.5, 5.5) and longer.b is None


@pytest.mark.parametrize(
    ("remat", "changes", "message"),
    [
        (["full"], {}, r"remat=\['full'\] must be 'none' or 'full', or one of these for each"),
        ("half", {}, r"remat='half' must be"),
        ("full", {"kept": None}, r"cost\.kept=None does not say"),
        ("full", {"kept": 2}, r"cost\.kept is 2 for stage 0 and cost\.activation is 1"),
        ("full", {"recompute": [1, 2, 3]}, r"cost\.recompute has 3 values for a placement of 2"),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused(
    remat: Any, changes: dict[str, Any], message: str
) -> None:
    cost = replace(Cost(f=1, i=1, w=1, kept=0.5), **changes)
    with pytest.raises(ScheduleError, match=message):
        cost.with_remat(remat, [0, 1])


@pytest.mark.parametrize(("placement", "memory"), CASES)
def test_a_search_finds_the_best_choice_and_order_of_all(
    placement: list[int], memory: float
) -> None:
    cost = Cost(f=2, i=3, w=1, comm=0.5, recompute=2, kept=0.4)
    choices = product(("none", "full"), repeat=len(placement))
    values = {}
    for remat in choices:
        case = cost.with_remat(remat, placement)
        values[remat] = best(tuple(placement), 2, case, memory)
    result = search(
        ranks=2, microbatches=2, cost=cost, memory=memory, placement=placement,
        remat=True, iterations=60,
    )  # fmt: skip
    assert result.remat is not None
    assert result.value == pytest.approx(min(values.values()))
    assert values[result.remat] == pytest.approx(result.value)
    assert result.bound <= result.value
    again = simulate(result.schedule, cost.with_remat(result.remat, placement))
    assert again.makespan == result.value and max(again.peak) <= memory + 1e-9


@pytest.mark.parametrize(("placement", "memory"), [("linear", 1.5), ("looped", 2.5), ("v", 1.5)])
def test_no_uniform_choice_and_no_first_stages_are_better(placement: Any, memory: float) -> None:
    cost = Cost(f=1, i=1.2, w=0.8, b=1.9, comm=0.1, kept=0.1)
    arguments: dict[str, Any] = {
        "ranks": 3, "microbatches": 5, "memory": memory, "placement": placement, "iterations": 10,
    }  # fmt: skip
    chosen = search(cost=cost, remat=True, **arguments)
    ranks = chosen.schedule.placement
    assert chosen.remat is not None and len(chosen.remat) == len(ranks)
    for count in range(len(ranks) + 1):
        remat = ["full"] * count + ["none"] * (len(ranks) - count)
        try:
            result = search(cost=cost.with_remat(remat, ranks), **arguments)
        except ScheduleError:
            continue
        assert chosen.value <= result.value + 1e-9
        assert chosen.bound <= result.value + 1e-9
    plain = search(cost=cost, **{**arguments, "memory": None})
    assert plain.remat is None


def test_memory_for_all_leaves_nothing_to_compute_again() -> None:
    cost = Cost(f=1, i=1, w=1, kept=0.1)
    result = search(ranks=3, microbatches=6, cost=cost, remat=True, iterations=10)
    assert result.remat == ("none",) * result.schedule.num_stages


def test_a_schedule_of_ones_own_is_the_start_where_it_fits() -> None:
    cost = Cost(f=1, i=1, w=1, kept=0.1)
    start = search(ranks=3, microbatches=5, cost=cost, placement="linear", iterations=5).schedule
    for memory in (None, 1.2):
        result = search(cost=cost, start=start, memory=memory, remat=True, iterations=5)
        assert result.remat is not None and result.schedule.placement == start.placement
        if memory is None:
            assert result.value <= simulate(start, cost).makespan


def test_a_search_by_the_clock_ends() -> None:
    cost = Cost(f=1, i=1, w=1, kept=0.1, comm=0.3)
    result = search(ranks=4, microbatches=8, cost=cost, memory=1.5, remat=True, seconds=1.0)
    assert result.remat is not None and max(result.timeline.peak) <= 1.5 + 1e-9


def test_what_admits_no_schedule_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"memory=0\.05 of rank 0 admits no schedule"):
        search(ranks=2, microbatches=2, cost=Cost(1, 1, 1, kept=0.1), memory=0.05, remat=True)
    with pytest.raises(ScheduleError, match=r"remat='full' must be True or False"):
        search(ranks=2, microbatches=2, cost=Cost(1, 1, 1), remat="full")  # type: ignore[arg-type]
