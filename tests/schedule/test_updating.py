"""The optimizer's step of each stage as an action of a schedule."""

from __future__ import annotations

from typing import Any

import pytest

from fpipe import Cost, Schedule, schedules, simulate, verify
from fpipe.errors import ScheduleError
from fpipe.schedule import Op

FAMILIES: dict[str, dict[str, Any]] = {
    "one_f_one_b": {},
    "gpipe": {},
    "interleaved_1f1b": {"stages_per_rank": 2},
    "zb_h1": {},
    "zbv": {},
    "dualpipev": {},
}


def text(schedule: Schedule, rank: int = 0) -> str:
    return " ".join(map(str, schedule.actions[rank]))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("update", [0.5, 4])
def test_every_family_updates_each_stage_once_and_loses_no_time_by_its_place(
    name: str, sharded: bool, update: float
) -> None:
    plain = schedules.get(name, ranks=2, microbatches=6, **FAMILIES[name])
    if sharded:
        plain = plain.sharded()
    cost = Cost(f=1, i=1, w=1, comm=0.5, reduce_grad=0.5, update=update)
    schedule = plain.updated(cost)
    verify(schedule)
    assert schedule.has_updates and not plain.has_updates
    updated = [a.stage for row in schedule.actions for a in row if a.op == Op.UPDATE]
    assert sorted(updated) == list(range(plain.num_stages))
    assert [[a for a in row if a.op != Op.UPDATE] for row in schedule.actions] == [
        list(row) for row in plain.actions
    ]
    updates = [
        [a for a in row if a.op == Op.UPDATE] for row in schedule.actions
    ]  # at the end, in the same order
    last = Schedule(
        plain.placement, [[*row, *end] for row, end in zip(plain.actions, updates, strict=True)]
    )
    assert simulate(schedule, cost).makespan <= simulate(last, cost).makespan


def test_an_update_stands_in_the_first_idle_time_that_is_long_enough() -> None:
    schedule = schedules.interleaved_1f1b(ranks=2, microbatches=2)
    cost = Cost(f=1, i=1, w=1, comm=1, update=1)
    assert text(schedule.updated(cost)).endswith("2B0 2B1 2UPDATE 0B0 0B1 0UPDATE")
    longer = Cost(f=1, i=1, w=1, comm=1, update=5)
    assert text(schedule.updated(longer)).endswith("2B0 2B1 0B0 0B1 2UPDATE 0UPDATE")


def test_an_update_takes_its_time_on_the_rank_once_gradients_are_reduced() -> None:
    schedule = Schedule.from_text("0F0 1F0 1B0 1REDUCE_GRAD 0B0 1UPDATE 0REDUCE_GRAD 0UPDATE")
    verify(schedule)
    cost = Cost(f=[1, 1], i=[1, 1], w=[1, 1], reduce_grad=[2, 9], update=[4, 3])
    events = {str(event.action): event for event in simulate(schedule, cost).events[0]}
    # The reduction of stage 1 lasts from 4 to 13; that of stage 0 begins when the rank comes to it.
    assert (events["1UPDATE"].start, events["1UPDATE"].end) == (13, 16)
    assert (events["0UPDATE"].start, events["0UPDATE"].end) == (18, 22)


def test_sharding_a_schedule_keeps_its_updates_behind_the_reductions() -> None:
    schedule = schedules.one_f_one_b(ranks=1, microbatches=2).updated().sharded(reduce=1)
    assert text(schedule).endswith("0B1 0RESHARD 0REDUCE_GRAD 0UPDATE")
    verify(schedule)


@pytest.mark.parametrize(
    ("rows", "requires", "message"),
    [
        ("0F0 0UPDATE 0B0", None, r"0B0 \(actions\[0\]\[2\], rank 0\) comes after 0UPDATE"),
        ("0F0 0B0 0UPDATE 0REDUCE_GRAD", None, r"0REDUCE_GRAD .* comes after 0UPDATE"),
        ("0F0 0B0 0UPDATE 0UPDATE", None, r"repeats 0UPDATE \(actions\[0\]\[2\]\)"),
        ("0F0 0B0 0UPDATE\n1F0 1B0", None, r"stage 1 has no 1UPDATE"),
        ("0F0 0UPDATE\n1F0 1B0 1UPDATE", ["F", "FW"], r"0UPDATE .* nothing to update"),
    ],
)
def test_an_update_in_a_wrong_place_is_refused(rows: str, requires: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(Schedule.from_text(rows), requires)


def test_files_keep_updates_and_csv_of_torch_leaves_them_out() -> None:
    schedule = schedules.zbv(ranks=2, microbatches=4).updated()
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert "UPDATE" not in schedule.to_csv()
    assert "UPDATE" in schedule.to_json()
    assert "UPDATE" in schedule.to_svg()


def test_costs_of_updates_are_scaled_and_merged_like_others() -> None:
    assert Cost(f=1, i=1, w=1, update=4).on([0, 1, 1, 0]).update == (2.0,) * 4
    assert Cost(f=[1, 1], i=1, w=1, update=[3, 4]).merged(2).update == (7,)
    with pytest.raises(ScheduleError, match="update=-1"):
        Cost(f=1, i=1, w=1, update=-1)
