"""The whole-stage actions that a sharding policy puts into a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fpipe import Schedule, schedules, verify
from fpipe.errors import ScheduleError
from fpipe.schedule import Op

FAMILIES: dict[str, dict[str, Any]] = {
    "one_f_one_b": {},
    "gpipe": {},
    "interleaved_1f1b": {"stages_per_rank": 2},
    "looped_bfs": {"stages_per_rank": 3},
    "zb_h1": {},
    "zbv": {},
    "dualpipev": {},
}


def text(schedule: Schedule, rank: int = 0) -> str:
    return " ".join(map(str, schedule.actions[rank]))


def family(name: str) -> Schedule:
    return schedules.get(name, ranks=2, microbatches=6, **FAMILIES[name])


def without_whole_stage(schedule: Schedule) -> Sequence[Sequence[object]]:
    return [[a for a in row if a.microbatch is not None] for row in schedule.actions]


def test_once_a_step_gathers_first_and_reduces_last() -> None:
    schedule = Schedule.from_text("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1")
    assert text(schedule.sharded()) == (
        "0UNSHARD 1UNSHARD 0F0 1F0 1B0 0B0 0F1 1F1 1B1 1RESHARD 1REDUCE_GRAD "
        "0B1 0RESHARD 0REDUCE_GRAD"
    )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("gather", ["step", 1, 2])
@pytest.mark.parametrize("reduce", ["step", 1, 2])
def test_every_family_under_every_policy_can_run(
    name: str, gather: int | str, reduce: int | str
) -> None:
    plain = family(name)
    sharded = plain.sharded(gather, reduce)
    verify(sharded)
    assert without_whole_stage(sharded) == without_whole_stage(plain)
    stages = len(plain.stages_of(0))
    assert sharded.gathered_at_once == (stages if gather == "step" else min(int(gather), stages))
    every = 6 if reduce == "step" else int(reduce)
    reduced = [a.stage for row in sharded.actions for a in row if a.op == Op.REDUCE_GRAD]
    assert all(reduced.count(stage) == 6 // every for stage in range(plain.num_stages))


def test_the_next_stage_is_gathered_while_the_one_before_it_computes() -> None:
    schedule = Schedule.from_text("0F0 1F0 2F0 2B0 1B0 0B0")
    assert text(schedule.sharded(gather=2, reduce="step")) == (
        "0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 2F0 2B0 2RESHARD 0UNSHARD "
        "2REDUCE_GRAD 1B0 1RESHARD 1REDUCE_GRAD 0B0 0RESHARD 0REDUCE_GRAD"
    )


def test_one_stage_at_a_time() -> None:
    schedule = Schedule.from_text("0F0 1F0 1B0 0B0")
    assert text(schedule.sharded(gather=1)) == (
        "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD 0UNSHARD "
        "1REDUCE_GRAD 0B0 0RESHARD 0REDUCE_GRAD"
    )


def test_a_new_policy_replaces_the_one_before() -> None:
    plain = family("zbv")
    assert plain.sharded(1, 1).sharded() == plain.sharded()
    assert plain.sharded().is_sharded
    assert not plain.is_sharded


def test_a_schedule_of_forwards_reduces_nothing() -> None:
    assert text(Schedule.from_text("0F0 0F1").sharded()) == "0UNSHARD 0F0 0F1 0RESHARD"


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "all", None])
def test_what_is_no_policy_is_refused(value: object) -> None:
    with pytest.raises(ScheduleError, match=r"gather=.* must be"):
        family("gpipe").sharded(gather=value)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=r"reduce=.* must be"):
        family("gpipe").sharded(reduce=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("gather", ["step", 1])
def test_policies_are_exchanged_in_every_form(gather: int | str, tmp_path: Path) -> None:
    sharded = family("zbv").sharded(gather, 2)
    for write, read in (
        (sharded.to_csv, Schedule.from_csv),
        (sharded.to_json, Schedule.from_json),
    ):
        path = tmp_path / write.__name__
        write(path)
        assert read(path) == sharded
    assert Schedule.from_text(sharded.to_text()) == sharded
