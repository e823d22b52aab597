"""Schedules drawn as text, as a person would draw them."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import pytest

from fpipe import Action, Op, Schedule, ScheduleError, schedules
from fpipe.schedule.grid import text_grid
from tests.schedule.rows import parse_row


def read(*rows: str) -> Schedule:
    return Schedule(range(len(rows)), [parse_row(row) for row in rows])


def drawn(text: str) -> str:
    return dedent(text).strip("\n")


def test_gpipe() -> None:
    assert str(schedules.gpipe(ranks=4, microbatches=8)) == drawn("""
        gpipe: 4 ranks, 4 stages, 8 microbatches
        time    0              5              10             15             20
        rank 0  F0 F1 F2 F3 F4 F5 F6 F7                   B0 B1 B2 B3 B4 B5 B6 B7
        rank 1     F0 F1 F2 F3 F4 F5 F6 F7             B0 B1 B2 B3 B4 B5 B6 B7
        rank 2        F0 F1 F2 F3 F4 F5 F6 F7       B0 B1 B2 B3 B4 B5 B6 B7
        rank 3           F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
        """)


def test_one_f_one_b() -> None:
    assert str(schedules.one_f_one_b(ranks=4, microbatches=8)) == drawn("""
        one_f_one_b: 4 ranks, 4 stages, 8 microbatches
        time    0              5              10             15             20
        rank 0  F0 F1 F2 F3          B0 F4 B1 F5 B2 F6 B3 F7 B4    B5    B6    B7
        rank 1     F0 F1 F2       B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5    B6    B7
        rank 2        F0 F1    B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6    B7
        rank 3           F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
        """)


def test_one_f_one_b_with_few_microbatches() -> None:
    assert text_grid(schedules.one_f_one_b(ranks=4, microbatches=2)) == drawn("""
        time    0              5
        rank 0  F0 F1                B0    B1
        rank 1     F0 F1          B0    B1
        rank 2        F0 F1    B0    B1
        rank 3           F0 B0 F1 B1
        """)


def test_eager_1f1b() -> None:
    assert text_grid(schedules.eager_1f1b(ranks=3, microbatches=6)) == drawn("""
        time    0              5              10             15
        rank 0  F0 F1 F2 F3 F4 B0 F5 B1    B2    B3    B4    B5
        rank 1     F0 F1 F2 B0 F3 B1 F4 B2 F5 B3    B4    B5
        rank 2        F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
        """)


def test_interleaved_1f1b() -> None:
    schedule = schedules.interleaved_1f1b(ranks=2, microbatches=4, stages_per_rank=2)
    assert text_grid(schedule) == drawn("""
        time    0                   5                   10                  15
        rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1     2B2     2B3 0B2 0B3
        rank 1      1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
        """)


def test_looped_bfs() -> None:
    schedule = schedules.looped_bfs(ranks=2, microbatches=3, stages_per_rank=2)
    assert text_grid(schedule) == drawn("""
        time    0                   5                   10
        rank 0  0F0 0F1 0F2 2F0 2F1 2F2         2B2 2B1 2B0 0B2 0B1 0B0
        rank 1      1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0
        """)


def test_zb_h1() -> None:
    assert text_grid(schedules.zb_h1(ranks=3, microbatches=4)) == drawn("""
        time    0              5              10
        rank 0  F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1     F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
        """)


def test_zb_h2_has_no_gap() -> None:
    assert text_grid(schedules.zb_h2(ranks=3, microbatches=5)) == drawn("""
        time    0              5              10             15
        rank 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
        rank 1     F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
        rank 2        F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
        """)


def test_interleaved_zero_bubble() -> None:
    schedule = schedules.interleaved_zero_bubble(ranks=2, microbatches=2, stages_per_rank=2)
    assert text_grid(schedule) == drawn("""
        time    0                   5                   10
        rank 0  0F0 0F1 2F0 2F1     2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        rank 1      1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
        """)


def test_zbv_wraps_into_bands() -> None:
    assert str(schedules.zbv(ranks=3, microbatches=5)) == drawn("""
        zbv: 3 ranks, 6 stages, 5 microbatches
        time    0                   5                   10
        rank 0  0F0 0F1 0F2 0F3 0F4 5F0 5I0 5W0 5F1 5I1 5W1 5F2 5I2 5W2 0I0
        rank 1      1F0 1F1 1F2 4F0 1F3 4F1 4I0 4W0 4F2 4I1 4W1 1F4 1I0 1W0
        rank 2          2F0 3F0 2F1 3F1 2F2 3F2 3I0 3W0 2F3 2I0 2W0 3F3 3I1

        time    15                  20                  25                  30
        rank 0  0W0 5F3 5I3 5W3 0I1 0W1 5F4 5I4 5W4 0I2 0W2 0I3 0W3 0I4 0W4
        rank 1  4F3 4I2 4W2 1I1 1W1 4F4 4I3 4W3 1I2 4I4 1I3 1W2 1I4 1W3 4W4 1W4
        rank 2  3W1 2F4 2I1 2W1 3F4 3I2 3W2 2I2 3I3 2I3 3I4 2I4 2W2 3W3 3W4 2W3 2W4
        """)


def test_dualpipev() -> None:
    assert text_grid(schedules.dualpipev(ranks=2, microbatches=4), width=None) == drawn("""
        time    0                   5                   10                  15
        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
        rank 1      1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
        """)


def test_a_long_schedule_shows_its_start_and_its_end() -> None:
    schedule = schedules.one_f_one_b(ranks=2, microbatches=32)
    assert text_grid(schedule, width=40, bands=2) == drawn("""
        time    0              5
        rank 0  F0 F1    B0 F2 B1 F3 B2 F4 B3
        rank 1     F0 B0 F1 B1 F2 B2 F3 B3 F4

        ... 10 to 59 left out, which bands=None draws ...

        time    60                  65
        rank 0  F30 B29 F31 B30     B31
        rank 1  B29 F30 B30 F31 B31
        """)
    whole = text_grid(schedule, width=40, bands=None)
    assert whole.count("rank 0") > 6
    assert "left out" not in whole
    assert text_grid(schedule, width=None).count("\n") == 2


@pytest.mark.parametrize("width", [1, 20, 33, 80, 200])
def test_lines_fit_the_width_from_five_columns_on(width: int) -> None:
    lines = text_grid(schedules.zbv(ranks=2, microbatches=12), width=width, bands=None).splitlines()
    assert max(map(len, lines)) <= max(width, len("rank 0  3W11 3W11 3W11 3W11 3W11"))
    assert all(line == line.rstrip() for line in lines)


def test_a_stage_on_another_rank_is_named() -> None:
    schedule = Schedule([1, 0], schedules.gpipe(ranks=2, microbatches=1).actions[::-1])
    assert text_grid(schedule) == drawn("""
        time    0
        rank 0      1F0 1B0
        rank 1  0F0         0B0
        """)


def test_whole_stage_actions_and_forwards_alone() -> None:
    assert text_grid(read("0UNSHARD 0F0 0F1 0RESHARD", "1F0 1F1")) == drawn("""
        time    0
        rank 0  UNSHARD F0 F1 RESHARD
        rank 1             F0 F1
        """)


def test_an_idle_rank() -> None:
    schedule = Schedule([0], [[Action(0, Op.F, 0), Action(0, Op.B, 0)], []])
    assert text_grid(schedule) == drawn("""
        time    0
        rank 0  0F0 0B0
        rank 1
        """)


@pytest.mark.parametrize(
    ("rows", "drawing"),
    [
        (("0F0 0B0", "1B0 1F0"), ["rank 0  F0 B0", "rank 1  B0 F0"]),
        (("0F0 0B0", "7F0"), ["rank 0  0F0 0B0", "rank 1  7F0"]),
        (("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), ["rank 0  F0 B0 F1 B1", "rank 1  F0 F1 B0 B1"]),
    ],
)
def test_what_cannot_run_is_drawn_as_plain_rows(rows: tuple[str, ...], drawing: list[str]) -> None:
    first, second, *lines = text_grid(read(*rows)).splitlines()
    assert first == "(cannot run as it stands, so there is no time in it; fpipe.verify says why)"
    assert second.startswith("place   0")
    assert lines == drawing


def test_nothing_to_draw() -> None:
    assert text_grid(read("", "")) == "time\nrank 0\nrank 1"


@pytest.mark.parametrize("limit", [{"bands": 1}, {"bands": -3}, {"bands": "2"}, {"width": 8.5}])
def test_limits_are_checked(limit: dict[str, Any]) -> None:
    ((name, value),) = limit.items()
    with pytest.raises(ScheduleError, match=f"{name}={value!r} must be . or more, or None"):
        text_grid(schedules.gpipe(ranks=2, microbatches=2), **limit)
