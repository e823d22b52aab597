"""What pictures show is what the timeline says: times, waits, messages, memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpipe import Action, Cost, Schedule, ScheduleError, Timeline, schedules, simulate
from fpipe.schedule.picture.chart_data import Chart, draw_up, unit_chart
from fpipe.schedule.picture.strip import strip
from tests.laboratory.random_schedules import schedules as random_schedules


def chart_of(timeline: Timeline) -> Chart:
    schedule = timeline.schedule
    return draw_up(schedule.name, schedule.placement, timeline.events, timeline.cost)


def path_of(chart: Chart) -> list[Action]:
    """The chain of waits that leads to the last end."""
    last = max(range(len(chart.rows)), key=lambda rank: chart.rows[rank][-1].end)
    here: tuple[int, int] | None = (last, len(chart.rows[last]) - 1)
    path = []
    while here is not None:
        box = chart.rows[here[0]][here[1]]
        path.append(box.action)
        here = box.waited
    return path[::-1]


@given(random_schedules(), st.sampled_from([0, 0.5, 2]))
def test_chart_repeats_the_timeline(schedule: Schedule, comm: float) -> None:
    timeline = simulate(schedule, Cost(f=2, i=3, w=1, comm=comm))
    chart = chart_of(timeline)
    rows = [[(box.action, box.start, box.end) for box in row] for row in chart.rows]
    assert rows == [[event[1:] for event in row] for row in timeline.events]
    assert chart.makespan == timeline.makespan
    assert chart.peaks == timeline.peak
    assert [chart.makespan * chart.idle[rank] for rank in range(schedule.num_ranks)] == (
        pytest.approx(timeline.bubble)
    )
    messages = {
        (chart.rows[a][i].action, chart.rows[b][j].action, a, b)
        for (a, i), (b, j) in chart.messages
    }
    assert messages == {transfer[:4] for transfer in timeline.transfers}


@given(random_schedules(), st.sampled_from([0, 0.5, 2]))
def test_every_action_starts_when_what_it_waited_for_is_there(
    schedule: Schedule, comm: float
) -> None:
    timeline = simulate(schedule, Cost(f=2, i=3, w=1, comm=comm))
    chart = chart_of(timeline)
    for row in chart.rows:
        for box in row:
            assert box.ready == box.start
    assert path_of(chart) == [event.action for event in timeline.critical_path]


@pytest.mark.parametrize("name", schedules.FAMILIES)
def test_a_schedule_is_drawn_as_simulated_with_units(name: str) -> None:
    schedule = schedules.get(name, ranks=4, microbatches=8)
    chart = unit_chart(schedule, schedule.name)
    assert chart.rows == chart_of(simulate(schedule, Cost(f=1, i=1, w=1))).rows
    assert chart.note == "unit costs"


def test_a_recorded_timeline_starts_at_zero_and_counts_seconds() -> None:
    simulated = simulate(schedules.gpipe(ranks=2, microbatches=3), Cost(f=1, i=1, w=1))
    events = tuple(
        tuple(event._replace(start=event.start + 8, end=event.end + 8) for event in row)
        for row in simulated.events
    )
    chart = chart_of(Timeline(simulated.schedule, events))
    assert chart.rows == chart_of(simulated).rows
    assert (chart.unit, chart_of(simulated).unit) == ("s", "")


def test_a_schedule_that_cannot_run_is_drawn_in_order() -> None:
    stuck = Schedule.from_text("0F0 0B0\n1B0 1F0")
    chart = unit_chart(stuck, stuck.name)
    assert chart.note == "cannot run as it stands: fpipe.verify says why"
    assert [(str(box.action), box.start, box.end) for box in chart.rows[1]] == [
        ("1B0", 0, 2),
        ("1F0", 2, 3),
    ]
    # Its actions wait in a circle, which the page followed for ever to find the critical path.
    assert all(box.waited is None for row in chart.rows for box in row)
    assert chart.messages == ()


def test_an_action_of_no_stage_is_refused() -> None:
    odd = Schedule([0], [[Action.parse("0F0"), Action.parse("3B0")]])
    with pytest.raises(ScheduleError, match=r"3B0 \(actions\[0\]\[1\]\) is of stage 3, and the"):
        odd.to_svg()


def test_shades_count_the_stages_of_a_rank() -> None:
    chart = unit_chart(schedules.zbv(ranks=2, microbatches=2), "zbv")
    assert {(box.action.stage, box.turn) for row in chart.rows for box in row} == {
        (0, 0),
        (1, 0),
        (2, 1),
        (3, 1),
    }


def test_what_every_rank_is_drawn_by_is_found_once() -> None:
    # Each rank went through all actions for it: most of the time of a large picture.
    chart = unit_chart(schedules.gpipe(ranks=3, microbatches=2), "gpipe")
    strip(chart)
    assert vars(chart).keys() >= {"makespan", "peaks"}
