"""The bound by states: exact where nothing is merged, and never above the best schedule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe import Cost, lower_bound, search
from fpipe.schedule.bounds.decision_diagram import walk
from fpipe.schedule.bounds.makespan import memory_limits
from fpipe.schedule.bounds.subpipeline import cut_subpipeline
from fpipe.schedule.placements import linear, looped, vee
from tests.laboratory.exhaustive import best

TINY = [
    ((0, 1), 2),
    ((0, 1, 2), 1),
    ((0, 1, 1, 0), 1),
    ((0, 1, 0, 1), 1),
    ((0, 0, 1), 1),
    ((0,), 3),
]
MANY = 10**6


@st.composite
def tiny_cases(draw: st.DrawFn) -> tuple[tuple[int, ...], int, Cost, float]:
    """A placement, microbatches, a cost whose B is I and W, and a memory that admits a schedule."""
    placement, microbatches = draw(st.sampled_from(TINY))
    stages = len(placement)

    def each(least: int, most: int) -> list[int]:
        return draw(st.lists(st.integers(least, most), min_size=stages, max_size=stages))

    activation = each(1, 2)
    freed = [draw(st.sampled_from([0, 0, size / 2, size])) for size in activation]
    cost = Cost(
        each(0, 4),
        each(0, 4),
        each(0, 4),
        comm=draw(st.integers(0, 3)),
        activation=activation,
        freed_by_i=freed,
    )
    least = max(
        sum(size for size, owner in zip(activation, placement, strict=True) if owner == rank)
        for rank in set(placement)
    )
    return placement, microbatches, cost, draw(st.sampled_from([least, least + 1, 2 * least, 100]))


def bound_of(
    placement: tuple[int, ...],
    microbatches: int,
    cost: Cost,
    memory: float,
    ranks: tuple[int, ...],
    width: int,
) -> tuple[float, bool]:
    costs = cost.on(placement)
    part = cut_subpipeline(costs, placement, memory_limits(memory, placement, costs), ranks)
    diagram = walk(part, microbatches, width, MANY)
    return diagram.bound, diagram.exact


@settings(max_examples=40)
@given(case=tiny_cases())
def test_all_ranks_together_give_the_best_of_all_schedules(
    case: tuple[tuple[int, ...], int, Cost, float],
) -> None:
    # All schedules: those too in which a stage takes its microbatches in another order.
    placement, microbatches, cost, memory = case
    everyone = tuple(sorted(set(placement)))
    value, exact = bound_of(placement, microbatches, cost, memory, everyone, MANY)
    assert exact
    assert value == pytest.approx(best(placement, microbatches, cost, memory))


@settings(max_examples=40)
@given(case=tiny_cases(), width=st.sampled_from([1, 2, 5]))
def test_some_ranks_and_merged_states_only_lower_it(
    case: tuple[tuple[int, ...], int, Cost, float], width: int
) -> None:
    placement, microbatches, cost, memory = case
    microbatches += 1  # the exact diagram is the judge
    everyone = tuple(sorted(set(placement)))
    truth, _ = bound_of(placement, microbatches, cost, memory, everyone, MANY)
    for ranks in ((0,), (max(placement),), everyone):
        value, _ = bound_of(placement, microbatches, cost, memory, ranks, width)
        assert value <= truth + 1e-9, (ranks, width)


@pytest.mark.parametrize("microbatches", [2, 3])
def test_microbatches_on_a_v_take_what_trying_all_orders_says(microbatches: int) -> None:
    cost = Cost(2, 2, 2, comm=1)
    truth = best(vee(2), microbatches, cost, memory=1)
    assert bound_of(vee(2), microbatches, cost, 1, (0, 1), MANY) == (truth, True)


def test_a_walk_that_would_take_too_long_is_given_up_early() -> None:
    costs = Cost(1, 1, 1).on(looped(8, 2))
    part = cut_subpipeline(costs, looped(8, 2), (8.0,) * 8, (0,))
    diagram = walk(part, 64, 4, 2_000)
    assert diagram.bound == 0 and not diagram.exact
    assert diagram.states < 2_000


def test_scarce_memory_on_a_v_is_bounded_by_the_last_rank() -> None:
    # Its two slots are taken from F of stage 3 until the gradient is back, in which time it can do
    # nothing: the formulas, which see its work and its memory apart, do not know that.
    cost = Cost(1, 1, 1, comm=0.5)
    assert lower_bound(vee(4), 12, cost, 2, effort=0) == 55.25
    assert lower_bound(vee(4), 12, cost, 2) == 62.5


@pytest.mark.parametrize(("memory", "least"), [(2, 61), (3, 44)])
def test_more_effort_proves_a_linear_schedule_the_best(memory: int, least: float) -> None:
    cost = Cost(1, 1, 1)
    bound = lower_bound(linear(4), 12, cost, memory, effort=8_000)
    assert bound == pytest.approx(least)


def test_a_span_is_bounded_without_fill_and_drain() -> None:
    cost = Cost(1, 1, 1, comm=0.5)
    span = lower_bound(vee(4), 12, cost, 2, objective="span")
    found = search(
        ranks=4,
        microbatches=12,
        cost=cost,
        memory=2,
        placement=vee(4),
        objective="span",
        iterations=50,
    )
    assert lower_bound(vee(4), 12, cost, 2, objective="span", effort=0) < span <= found.value
    assert span <= lower_bound(vee(4), 12, cost, 2)
