"""Timelines as text to scale, and the round numbers of an axis."""

from __future__ import annotations

from textwrap import dedent

import pytest

from fpipe import Cost, Schedule, ScheduleError, Timeline, schedules, simulate
from fpipe.schedule.picture.captions import readable_unit, short, ticks


def test_strip_of_one_f_one_b() -> None:
    timeline = simulate(schedules.one_f_one_b(ranks=4, microbatches=4), Cost(1, 1, 1))
    # 21 units of time in 42 columns
    assert timeline.to_text(width=71) == dedent("""
        time    0         5         10        15        20
        rank 0  FFFFFFFF............BBBB..BBBB..BBBB..BBBB  idle 42.9 %  peak 4
        rank 1  ..FFFFFF........BBBBFFBBBB..BBBB..BBBB....  idle 42.9 %  peak 3
        rank 2  ....FFFF....BBBBFFBBBBFFBBBB..BBBB........  idle 42.9 %  peak 2
        rank 3  ......FFBBBBFFBBBBFFBBBBFFBBBB............  idle 42.9 %  peak 1
        """).strip("\n")


def test_strip_of_zbv_has_small_letters_for_the_second_stage() -> None:
    timeline = simulate(schedules.zbv(ranks=2, microbatches=2), Cost(2, 2, 2))
    assert timeline.to_text(width=59).splitlines()[1:] == [
        "rank 0  FFFF..ffiiwwffiiwwIIWW..IIWW  idle 14.3 %  peak 1.5",
        "rank 1  ..FFffFFffiiwwIIWWiiwwIIWW..  idle 14.3 %  peak 2",
    ]


def test_printing_a_timeline_fits_a_terminal() -> None:
    timeline = simulate(schedules.zbv(ranks=16, microbatches=64), Cost(1, 1, 1))
    lines = str(timeline).splitlines()
    assert lines[0] == "<Timeline of zbv: makespan 199.5, span 192>"
    assert len(lines) == 18
    assert max(map(len, lines)) <= 80


def test_strip_of_a_recorded_timeline_names_the_unit() -> None:
    simulated = simulate(schedules.gpipe(ranks=1, microbatches=1), Cost(0.01, 0.01, 0.01))
    recorded = Timeline(simulated.schedule, simulated.events)
    assert recorded.to_text(width=60).splitlines()[0].endswith("(ms)")


def test_strip_without_time_and_with_whole_stage_actions() -> None:
    schedule = Schedule.from_text("0UNSHARD 0F0 0B0 0RESHARD")
    timeline = simulate(schedule, Cost(0, 0, 0))
    assert "idle" in timeline.to_text()


def test_strip_refuses_what_is_too_narrow() -> None:
    timeline = simulate(schedules.gpipe(ranks=1, microbatches=1), Cost(1, 1, 1))
    with pytest.raises(ScheduleError, match="width=49 must be 50 characters or more"):
        timeline.to_text(width=49)
    with pytest.raises(ScheduleError, match=r"width=1000000 must be .* less than 1000000"):
        timeline.to_text(width=10**6)
    with pytest.raises(ScheduleError, match="width=inf must be"):
        timeline.to_text(width=float("inf"))  # type: ignore[arg-type]


def test_long_numbers_do_not_run_into_one_another() -> None:
    timeline = simulate(schedules.gpipe(ranks=1, microbatches=1), Cost(1e100, 1e100, 1e100))
    marks = timeline.to_text(width=80).splitlines()[0].split()[1:]
    assert marks == ["0", "5e+99", "1e+100", "1.5e+100", "2.5e+100"]


def test_axis() -> None:
    assert ticks(0, 5) == [0]
    assert ticks(1e-3, 4) == pytest.approx([0, 5e-4, 1e-3])
    assert ticks(199.5, 10) == [0, 20, 40, 60, 80, 100, 120, 140, 160, 180]
    assert short(0) == "0"
    assert short(123456) == "123.5k"
    assert readable_unit(2e-5, "s") == (1e6, "µs")
    assert readable_unit(2, "s") == (1, "s")
