"""Collectives in a simulation: a lane beside each rank, what waits for it, and what is drawn."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fpipe import Cost, Schedule, ScheduleError, schedules, simulate
from fpipe.schedule.timeline import Timeline


def timed(schedule: Schedule, **cost: Any) -> tuple[Timeline, dict[str, tuple[float, float]]]:
    timeline = simulate(schedule, Cost(f=2, i=1, w=1, **cost))
    times = {str(e.action): (e.start, e.end) for row in timeline.events for e in row}
    return timeline, times


def test_a_rank_computes_beside_its_collectives_and_waits_for_what_it_needs() -> None:
    schedule = Schedule.from_text("0F0 1F0 1B0 0B0").sharded()
    timeline, times = timed(schedule, unshard=6, reduce_grad=4)
    # Half of each number for a stage; the second gather runs while 0F0 computes.
    assert times["0UNSHARD"] == (0, 3)
    assert times["1UNSHARD"] == (3, 6)
    assert times["0F0"] == (3, 4)
    assert times["1F0"] == (6, 7)
    assert times["1REDUCE_GRAD"] == (8, 10)
    assert times["0B0"] == (8, 9)
    assert times["0REDUCE_GRAD"] == (10, 12)  # behind the other in the lane
    assert timeline.makespan == 12
    assert timeline.busy == (4,)
    assert timeline.idle(0) == ((0, 3), (4, 6), (9, 12))
    path = [str(event.action) for event in timeline.critical_path]
    assert " ".join(path) == ("0UNSHARD 1UNSHARD 1F0 1B0 1RESHARD 1REDUCE_GRAD 0REDUCE_GRAD")


def test_without_a_lane_a_rank_does_one_thing_at_a_time() -> None:
    schedule = Schedule.from_text("0F0 1F0 1B0 0B0").sharded()
    timeline, times = timed(schedule, unshard=6, reduce_grad=4, collective_lane=False)
    assert times["0F0"] == (6, 7)
    assert times["1REDUCE_GRAD"] == (9, 11)
    assert timeline.makespan == 14
    assert timeline.busy == (14,)


def test_a_reduction_waits_for_that_of_the_round_before() -> None:
    schedule = Schedule.from_text("0F0 0F1 0B0 0B1").sharded(reduce=1)
    _, times = timed(schedule, reduce_grad=5)
    assert times["0B1"] == (6, 8)
    # The second REDUCE_GRAD, which the first one's end at 11 holds up.
    assert times["0REDUCE_GRAD"] == (11, 16)


def test_gathering_more_often_costs_time_where_it_is_not_hidden() -> None:
    plain = schedules.interleaved_1f1b(ranks=2, microbatches=4, stages_per_rank=2)
    cost = Cost(f=1, i=1, w=1, unshard=2, reduce_grad=1)
    makespans = [simulate(plain.sharded(gather), cost).makespan for gather in ("step", 2, 1)]
    assert makespans[0] == makespans[1] < makespans[2]


@pytest.mark.parametrize("lane", [True, False])
def test_collectives_are_drawn_beside_the_rank(lane: bool) -> None:
    schedule = Schedule.from_text("0F0 1F0 1B0 0B0").sharded()
    timeline, _ = timed(schedule, unshard=6, reduce_grad=4, collective_lane=lane)
    threads = {event["tid"] for event in json.loads(timeline.to_trace())["traceEvents"]}
    assert threads == ({0, 1} if lane else {0})
    assert ("-" in timeline.to_text().splitlines()[-1]) == (not lane)
    assert timeline.to_svg().count("<path") > 3


def test_the_cost_of_collectives_is_written_and_read(tmp_path: Path) -> None:
    cost = Cost(f=1, i=1, w=1, unshard=[1, 2], reduce_grad=3, collective_lane=False)
    cost.to_json(tmp_path / "cost.json")
    assert Cost.from_json(tmp_path / "cost.json") == cost
    assert "unshard" not in Cost(f=1, i=1, w=1).to_json()


@pytest.mark.parametrize("value", [1, "yes", None])
def test_a_lane_is_there_or_not(value: Any) -> None:
    with pytest.raises(ScheduleError, match="collective_lane"):
        Cost(f=1, i=1, w=1, collective_lane=value)


def test_no_rank_waits_for_a_collective_that_takes_no_time() -> None:
    """It waits for those before it in the lane, and was taken for work of the rank's."""
    rows = "0F0 1F0 2F0 2B0 2REDUCE_GRAD 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD"
    cost = Cost(f=1, i=0, w=0, b=1, reduce_grad=[0, 0, 5], collective_lane=True)
    timeline = simulate(Schedule.from_text(rows), cost)
    path = timeline.critical_path
    assert all(before.end <= after.start for before, after in pairwise(path))
    walked = " ".join(str(event.action) for event in path)
    assert walked == "0F0 1F0 2F0 2B0 2REDUCE_GRAD 1REDUCE_GRAD 0REDUCE_GRAD"
