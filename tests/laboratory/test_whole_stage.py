"""Whole-stage work in simulation, search and bounds: before all actions, and behind them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fpipe
from fpipe import Action, Cost, Op, Schedule, lower_bound, search, simulate
from fpipe.schedule.bounds.makespan import Objective
from fpipe.schedule.orders.evaluator import make_evaluator
from fpipe.schedule.orders.problem import make_problem, to_order, to_schedule
from fpipe.schedule.simulator import with_whole_stage
from tests.laboratory.random_schedules import costs, schedules
from tests.laboratory.relaxation import relaxed

WORK: list[dict[str, Any]] = [
    {"reduce_grad": 7},
    {"update": 3},
    {"unshard": 5, "reduce_grad": 7, "update": 3},
    {"unshard": 5, "reduce_grad": 7, "update": 3, "collective_lane": False},
]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Cost]:
    """A schedule without whole-stage actions, and a cost that has times for some."""
    schedule = draw(schedules())
    shape = schedule.num_stages, schedule.num_ranks, schedule.num_microbatches
    times = st.lists(st.integers(0, 6), min_size=shape[0], max_size=shape[0])
    names = draw(st.sets(st.sampled_from(["unshard", "reduce_grad", "update"])))
    whole: dict[str, Any] = {name: draw(times) for name in sorted(names)}
    cost = replace(draw(costs(*shape)), collective_lane=draw(st.booleans()), **whole)
    return schedule, cost


@settings(max_examples=70)
@given(case=cases())
def test_simulation_agrees_with_one_that_relaxes_rules(case: tuple[Schedule, Cost]) -> None:
    schedule, cost = case
    whole = with_whole_stage(schedule, cost)
    fpipe.verify(whole)
    timeline = simulate(whole, cost)
    expected = relaxed(whole, cost)
    assert {
        (rank, at): (event.start, event.end)
        for rank, row in enumerate(timeline.events)
        for at, event in enumerate(row)
        if event.action.op != Op.RESHARD  # which takes no time, whenever it is
    } == {
        (rank, at): times
        for (rank, at), times in expected.items()
        if whole.actions[rank][at].op != Op.RESHARD
    }


@settings(max_examples=70)
@given(case=cases(), span=st.booleans())
def test_an_order_has_the_value_of_its_schedule(case: tuple[Schedule, Cost], span: bool) -> None:
    schedule, cost = case
    objective: Objective = "span" if span else "makespan"
    problem = make_problem(schedule.placement, schedule.num_microbatches, cost, None, objective)
    order = to_order(problem, schedule)
    timeline = simulate(with_whole_stage(to_schedule(problem, order, "own"), cost), cost)
    expected = timeline.span if span else timeline.makespan
    evaluator = make_evaluator(problem)
    value, ends = evaluator.times(order.rows, order.fused)
    assert value == pytest.approx(expected)
    assert problem.played(order).value == pytest.approx(expected)
    for action in evaluator.critical(replace(order, value=value), ends):
        problem.parts(action)


@settings(max_examples=30)
@given(case=cases())
def test_no_schedule_is_below_the_bound(case: tuple[Schedule, Cost]) -> None:
    schedule, cost = case
    timeline = simulate(with_whole_stage(schedule, cost), cost)
    count = schedule.num_microbatches
    assert lower_bound(schedule.placement, count, cost) <= timeline.makespan + 1e-9
    assert lower_bound(schedule.placement, count, cost, objective="span") <= timeline.span + 1e-9
    # By the formulas: what effort adds in scarce memory may be less, for there is more to look at.
    least = lower_bound(schedule.placement, count, cost, effort=0)
    assert least - 1e-9 <= timeline.bound <= timeline.makespan + 1e-9
    # One that does none of the work may be faster, and has its own bound.
    plain = simulate(schedule, cost)
    assert plain.bound <= plain.makespan + 1e-9


def every_row(stage: int) -> Iterator[list[Action]]:
    """The orders of two microbatches of a stage."""
    left = [[Action(stage, op, number) for op in (Op.F, Op.I, Op.W)] for number in range(2)]

    def rest(first: list[Action], second: list[Action]) -> Iterator[list[Action]]:
        if not first or not second:
            yield [*first, *second]
            return
        yield from ([first[0], *row] for row in rest(first[1:], second))
        yield from ([second[0], *row] for row in rest(first, second[1:]))

    return rest(*left)


@pytest.mark.parametrize("work", WORK)
def test_a_search_finds_the_best_of_all(work: dict[str, Any]) -> None:
    cost = Cost(f=[3, 2], i=[1, 4], w=[2, 3], comm=1, **work)
    values = []
    for rows in product(every_row(0), every_row(1)):
        schedule = Schedule([0, 1], rows)
        try:
            values.append(simulate(with_whole_stage(schedule, cost), cost).makespan)
        except fpipe.ScheduleError:
            continue  # which waits for itself
    result = search(ranks=2, microbatches=2, cost=cost, placement="linear", iterations=100)
    assert result.value == min(values)
    assert result.bound <= min(values)


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("work", WORK)
def test_a_search_returns_the_work_and_counts_it(
    work: dict[str, Any], objective: Objective
) -> None:
    cost = Cost(f=1, i=1, w=1, comm=0.5, **work)
    result = search(ranks=2, microbatches=4, cost=cost, iterations=20, objective=objective)
    schedule = result.schedule
    fpipe.verify(schedule)
    assert schedule.is_sharded == cost.shards and schedule.has_updates == cost.updates
    assert result.timeline.makespan == simulate(schedule, cost).makespan
    assert result.bound <= result.value
    for name in ("zb_h1", "zbv", "interleaved_1f1b"):
        family = getattr(fpipe.schedules, name)(ranks=2, microbatches=4)
        timeline = simulate(with_whole_stage(family, cost), cost)
        best = timeline.span if objective == "span" else timeline.makespan
        assert result.value <= best


def test_a_long_reduction_changes_what_is_best() -> None:
    """The V that has the least makespan without them ends both stages of a rank at one time."""
    plain = Cost(f=10, i=10, w=10, comm=1)
    long = replace(plain, reduce_grad=120)
    without = search(ranks=4, microbatches=12, cost=plain, memory=8, iterations=100, placement="v")
    with_them = search(ranks=4, microbatches=12, cost=long, memory=8, iterations=100)
    before = simulate(with_whole_stage(without.schedule, long), long).makespan
    assert with_them.value < 0.98 * before


def test_a_search_of_large_problems_counts_the_work_too() -> None:
    cost = Cost(f=1, i=1, w=1, reduce_grad=8, update=1)
    result = search(ranks=8, microbatches=600, cost=cost, iterations=10, placement="linear")
    assert result.value == simulate(result.schedule, cost).makespan
    assert result.schedule.has_updates


def test_values_per_stage_say_how_many_stages_a_search_places() -> None:
    cost = Cost(f=1, i=1, w=1, update=[1, 1, 2, 2])
    assert search(ranks=2, microbatches=2, cost=cost, iterations=5).schedule.num_stages == 4


def test_whole_stage_actions_that_are_there_stay() -> None:
    cost = Cost(f=1, i=1, w=1, reduce_grad=2, update=1)
    sharded = fpipe.schedules.gpipe(ranks=2, microbatches=2).sharded(reduce=1)
    assert with_whole_stage(sharded, cost) is sharded
    plain = fpipe.schedules.gpipe(ranks=2, microbatches=2)
    assert with_whole_stage(plain, Cost(f=1, i=1, w=1)) is plain
    assert with_whole_stage(plain, cost).name == plain.name
