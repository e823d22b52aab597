"""Microbatches of different sizes: what they take and hold, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fpipe
from fpipe import Cost, ScheduleError, lower_bound, simulate
from tests.laboratory.random_schedules import costs, schedules

SIZES = [3, 1, 2]


def test_each_action_takes_as_many_times_as_its_microbatch_is_large() -> None:
    # rank 0: F0 F0 F0 F1 F2 F2 ... and rank 1 begins when F0 has ended
    timeline = simulate(fpipe.schedules.gpipe(ranks=2, microbatches=3), Cost(1, 1, 1, sizes=SIZES))
    assert [event.start for event in timeline.events[0][:3]] == [0, 3, 4]
    assert [event.end - event.start for event in timeline.events[1]] == [3, 1, 2, 6, 2, 4]
    assert timeline.busy == (18, 18)


def test_each_microbatch_holds_as_much_as_it_is_large() -> None:
    cost = Cost(1, 1, 1, activation=10, freed_by_i=4, sizes=SIZES)
    assert simulate(fpipe.schedules.gpipe(ranks=2, microbatches=3), cost).peak == (60, 60)
    timeline = simulate(fpipe.schedules.one_f_one_b(ranks=2, microbatches=3), cost)
    assert timeline.peak == (40, 30)
    # I frees 12 of the 30 of microbatch 0 before F1 takes its 10.
    split = simulate(fpipe.schedules.zb_h1(ranks=2, microbatches=3), cost)
    assert [amount for _, amount in split.memory(1)][:3] == [30, 18, 28]
    assert "30" in timeline.to_svg()


def test_sizes_that_are_alike_are_a_unit() -> None:
    schedule = fpipe.schedules.zbv(ranks=3, microbatches=7)
    cost = Cost(2, 3, 1, comm=1, activation=5)
    twice = simulate(schedule, replace(cost, sizes=(2,) * 7))
    assert twice.makespan == simulate(schedule, Cost(4, 6, 2, comm=1, activation=5)).makespan
    assert twice.peak == simulate(schedule, Cost(4, 6, 2, comm=1, activation=10)).peak


@settings(max_examples=150)
@given(data=st.data())
def test_no_schedule_beats_the_bound(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    shape = schedule.num_stages, schedule.num_ranks, schedule.num_microbatches
    timeline = simulate(schedule, data.draw(costs(*shape)))
    assert timeline.bound <= timeline.makespan * (1 + 1e-9)
    assert timeline.cost is not None
    span = lower_bound(
        schedule.placement, schedule.num_microbatches, timeline.cost, objective="span"
    )
    assert span <= timeline.span * (1 + 1e-9)


def test_the_bound_is_met_where_a_rank_is_always_busy() -> None:
    cost = Cost(1, 1, 1, sizes=SIZES)
    timeline = simulate(fpipe.schedules.one_f_one_b(ranks=1, microbatches=3), cost)
    assert timeline.gap == 0 and timeline.makespan == 3 * sum(SIZES)
    # The smallest comes first, and takes 1 on rank 0.
    assert lower_bound([0, 1], 3, cost) == 1 + 3 * sum(SIZES)


def test_the_bound_wants_memory_for_the_largest() -> None:
    with pytest.raises(ScheduleError, match=r"memory=2 of rank 0 admits no schedule: .* is 3"):
        lower_bound([0, 1], 2, Cost(1, 1, 1, sizes=[1, 3]), memory=2)


def test_sizes_are_as_many_as_microbatches() -> None:
    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=4)
    cost = Cost(1, 1, 1, sizes=SIZES)
    message = r"cost.sizes has 3 values for 4 microbatches: give one for each"
    with pytest.raises(ScheduleError, match=message):
        simulate(schedule, cost)
    with pytest.raises(ScheduleError, match=message):
        lower_bound([0, 1], 4, cost)
    with pytest.raises(ScheduleError, match=message):
        replace(simulate(schedule, Cost(1, 1, 1)), cost=cost)


def test_what_makes_schedules_takes_microbatches_as_alike() -> None:
    cost = Cost(1, 1, 1, sizes=SIZES)
    with pytest.raises(ScheduleError, match=r"cost.sizes is given, and fpipe.search takes all"):
        fpipe.search(ranks=2, microbatches=3, cost=cost)
    with pytest.raises(ScheduleError, match=r"cost.sizes is given, and zb_auto takes all .* alike"):
        fpipe.schedules.zb_auto(ranks=2, microbatches=3, cost=cost)
