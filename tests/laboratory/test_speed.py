"""Ranks of unequal speed: a cost with speeds is one with other times for each stage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe import Cost, Schedule, ScheduleError, lower_bound, schedules, search, simulate
from tests.laboratory.exhaustive import best
from tests.laboratory.test_pairs import paired


@settings(max_examples=30)
@given(case=paired(), data=st.data())
def test_a_step_is_that_of_a_cost_whose_times_are_divided(
    case: tuple[Schedule, Cost], data: st.DataObject
) -> None:
    schedule, cost = case
    ranks = schedule.num_ranks
    speed = data.draw(st.lists(st.sampled_from([0.5, 1, 2, 4]), min_size=ranks, max_size=ranks))
    costs = cost.on(schedule.placement, ranks)
    divided: dict[str, Any] = {
        name: tuple(
            time / speed[rank]
            for time, rank in zip(getattr(costs, name), schedule.placement, strict=True)
        )
        for name in ("f", "i", "w", "b", "update")
    }
    timeline = simulate(schedule, replace(cost, speed=tuple(speed)))
    plain = simulate(schedule, replace(cost, **divided))
    assert timeline.events == plain.events
    assert timeline.bound == plain.bound <= timeline.makespan + 1e-9


def test_ranks_of_speed_one_change_nothing() -> None:
    cost = Cost(f=10, i=12, w=8, comm=1, unshard=3, update=2)
    assert replace(cost, speed=(1, 1)).on([0, 1, 1, 0]) == cost.on([0, 1, 1, 0])
    costs = replace(cost, speed=(2, 1)).on([0, 1, 1, 0])
    assert costs.f == (2.5, 5, 5, 2.5) and costs.b == (5, 10, 10, 5)
    assert costs.update == (0.5, 1, 1, 0.5) and costs.unshard == (1.5,) * 4  # which is messages


def test_a_search_knows_speeds() -> None:
    cost = Cost(f=2, i=2, w=2, speed=[2, 1])
    expected = best((0, 1), 2, cost, 9.0)
    result = search(ranks=2, microbatches=2, cost=cost, placement="linear", iterations=60)
    assert result.value == pytest.approx(expected) and result.bound <= expected
    assert lower_bound([0, 1], 2, cost) == pytest.approx(result.bound)
    # The slow rank is the last to begin, or to have the most: the order of ranks is a choice.
    turned = search(ranks=2, microbatches=2, cost=cost, placement=[1, 0], iterations=60)
    assert turned.value == pytest.approx(best((1, 0), 2, cost, 9.0))


def test_a_choice_to_compute_again_keeps_the_speeds() -> None:
    cost = Cost(f=2, i=2, w=2, kept=0.1, speed=[2, 1])
    again = cost.with_remat("full", [0, 1])
    assert again.f == (1, 2) and again.i == (2, 4) and again.speed is None
    longer = replace(cost, recompute=1).with_remat("full", [0, 1])
    assert longer.i == (1.5, 3)
    result = search(
        ranks=2, microbatches=4, cost=cost, memory=1.1, remat=True, iterations=5
    )  # fmt: skip
    assert result.value == result.timeline.makespan


def test_speeds_are_written_and_read(tmp_path: Path) -> None:
    cost = Cost(f=1, i=1, w=1, speed=[2, 1])
    cost.to_json(tmp_path / "cost.json")
    assert Cost.from_json(tmp_path / "cost.json") == cost
    assert json.loads(cost.to_json())["speed"] == [2, 1]


@pytest.mark.parametrize(
    ("speed", "message"),
    [
        (2, r"cost speed=2 must be a sequence, a number per rank"),
        ([1, 0], r"cost speed=\(1, 0\) must have a number above 0 for each rank, or be None"),
        ([1, -1], r"cost speed\[1\]=-1 must be"),
        ({1: 2}, "a dict, which has no order"),
    ],
)
def test_a_bad_speed_is_named(speed: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Cost(f=1, i=1, w=1, speed=speed)
    with pytest.raises(ScheduleError, match=r"cost\.speed has 1 values for 2 ranks"):
        simulate(schedules.gpipe(ranks=2, microbatches=2), Cost(1, 1, 1, speed=[1]))
