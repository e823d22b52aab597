"""What a timeline knows: makespan, span, bubbles, memory, what waited for what."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fpipe
from fpipe import Cost, Schedule, ScheduleError, Timeline, simulate
from tests.laboratory.random_schedules import costs, schedules
from tests.schedule.rows import parse_row

UNIT = Cost(f=1, i=1, w=1)


def test_span_is_a_ranks_own_time_and_bubble_what_it_idles() -> None:
    timeline = simulate(fpipe.schedules.zb_h2(ranks=4, microbatches=7), UNIT)
    assert timeline.makespan == 24
    assert timeline.spans == (21, 21, 21, 21)
    assert timeline.span == 21
    assert timeline.busy == (21, 21, 21, 21)
    assert timeline.bubble == (3, 3, 3, 3)


@pytest.mark.parametrize("family", fpipe.schedules.FAMILIES)
def test_idle_is_the_bubble_in_its_parts(family: str) -> None:
    schedule = fpipe.schedules.get(family, ranks=3, microbatches=6)
    timeline = simulate(schedule, Cost(0.1, 0.3, 0.2, comm=0.05))
    for rank, bubble in enumerate(timeline.bubble):
        gaps = timeline.idle(rank)
        assert sum(end - start for start, end in gaps) == pytest.approx(bubble)
        for start, end in gaps:
            assert timeline.start <= start < end <= timeline.end
            assert all(e.end <= start or e.start >= end for e in timeline.events[rank])
    with pytest.raises(ScheduleError, match="rank=3 must be from 0 to 2"):
        timeline.idle(3)


def test_idle_of_ranks_that_run_nothing() -> None:
    timeline = simulate(Schedule([0, 2], [parse_row("0F0 0B0"), [], parse_row("1F0 1B0")]), UNIT)
    assert timeline.idle(1) == ((0.0, timeline.makespan),)
    assert Timeline(Schedule([0], [[]]), ((),)).idle(0) == ()


def test_memory_rises_with_f_and_falls_with_b() -> None:
    timeline = simulate(
        Schedule([0], [parse_row("0F0 0F1 0B0 0I1 0W1")]), Cost(1, 1, 1, activation=10)
    )
    assert timeline.memory(0) == ((0, 10), (1, 20), (4, 10), (5, 10), (6, 0))
    assert timeline.peak == (20,)


def test_each_microbatch_may_have_its_backward_in_another_form() -> None:
    # A stage that owes no I. What W alone frees was less wherever another microbatch had an I.
    schedule = Schedule([0], [parse_row("0F0 0I0 0W0 0F1 0W1 0F2 0B2")])
    fpipe.verify(schedule, requires="FW")
    timeline = simulate(schedule, Cost(1, 1, 1, activation=10, freed_by_i=4))
    assert timeline.memory(0) == ((0, 10), (2, 6), (3, 0), (3, 10), (5, 0), (5, 10), (8, 0))


def test_memory_may_be_in_any_unit() -> None:
    # What is held was rounded to twelve digits after the point.
    timeline = simulate(
        fpipe.schedules.zb_h1(ranks=2, microbatches=4), Cost(1, 1, 1, activation=3e-13)
    )
    assert timeline.peak == (6e-13, 6e-13)


def test_i_frees_its_part_or_holds_more() -> None:
    schedule = Schedule([0], [parse_row("0F0 0I0 0W0")])
    frees = simulate(schedule, Cost(1, 1, 1, activation=10, freed_by_i=4))
    assert frees.memory(0) == ((0, 10), (2, 6), (3, 0))
    holds = simulate(schedule, Cost(1, 1, 1, activation=10, freed_by_i=-2))
    assert holds.peak == (12,)


def test_thirds_add_up() -> None:
    schedule = fpipe.schedules.interleaved_zero_bubble(ranks=4, microbatches=8, stages_per_rank=3)
    assert simulate(schedule, UNIT).peak == (4, 4, 4, 4)


def test_critical_path_of_gpipe_goes_down_and_up() -> None:
    timeline = simulate(fpipe.schedules.gpipe(ranks=2, microbatches=2), Cost(1, 1, 1, comm=1))
    path = [str(event.action) for event in timeline.critical_path]
    assert path == ["0F0", "1F0", "1F1", "1B0", "0B0", "0B1"]


@settings(max_examples=60)
@given(data=st.data())
def test_the_critical_path_accounts_for_the_whole_makespan(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    cost = data.draw(costs(schedule.num_stages, schedule.num_ranks))
    timeline = simulate(schedule, cost)
    path = timeline.critical_path
    assert path[0].start == 0
    assert path[-1].end == timeline.makespan
    for before, after in pairwise(path):
        assert after.start == before.end + cost.hop(before.rank, after.rank)


def test_transfers_cross_ranks_and_take_the_latency() -> None:
    timeline = simulate(fpipe.schedules.gpipe(ranks=2, microbatches=1), Cost(1, 1, 1, comm=4))
    there, back = sorted(timeline.transfers, key=lambda transfer: transfer.sent)
    assert (str(there.source), str(there.target), there.sent, there.arrives) == ("0F0", "1F0", 1, 5)
    assert (back.source_rank, back.target_rank, back.sent, back.arrives) == (1, 0, 8, 12)


def test_a_weight_gradient_alone_waits_for_the_stage_after() -> None:
    # It was taken for one that its own I precedes, which waits for no other rank.
    schedule = Schedule([0, 1], [parse_row("0F0 0W0"), parse_row("1F0 1B0")])
    timeline = simulate(schedule, Cost(1, 1, 1, comm=4))
    assert [str(event.action) for event in timeline.critical_path] == ["0F0", "1F0", "1B0", "0W0"]
    assert [str(transfer.source) for transfer in timeline.transfers] == ["1B0", "0F0"]


def test_stages_of_one_rank_transfer_nothing() -> None:
    assert simulate(Schedule([0, 0], [parse_row("0F0 1F0 1B0 0B0")]), UNIT).transfers == ()


def test_a_recorded_run_is_a_timeline_without_a_cost() -> None:
    simulated = simulate(fpipe.schedules.one_f_one_b(ranks=2, microbatches=3), UNIT)
    later = tuple(
        tuple(event._replace(start=event.start + 100, end=event.end + 100) for event in row)
        for row in simulated.events
    )
    recorded = Timeline(simulated.schedule, later)
    assert recorded.start == 100
    assert recorded.makespan == simulated.makespan
    assert recorded.peak == simulated.peak
    assert [event.action for event in recorded.critical_path] == [
        event.action for event in simulated.critical_path
    ]
    assert all(transfer.arrives >= transfer.sent for transfer in recorded.transfers)
    with pytest.raises(ScheduleError, match=r"timeline.cost=None has no lower bound"):
        _ = recorded.gap
    assert replace(recorded, cost=UNIT).gap == simulated.gap
    # A run that was faster than its cost allows had a gap of 0, which proves that nothing is.
    assert replace(recorded, cost=Cost(f=2, i=2, w=2)).gap < -0.1


def test_gap_is_zero_where_a_schedule_cannot_be_beaten() -> None:
    assert simulate(fpipe.schedules.zb_h1(ranks=4, microbatches=8), UNIT).gap == 0
    timeline = simulate(fpipe.schedules.gpipe(ranks=4, microbatches=8), UNIT)
    assert (timeline.makespan, timeline.bound) == (33, 27)
    assert timeline.gap == pytest.approx(6 / 27)


def test_evaluation_has_no_training_bound() -> None:
    timeline = simulate(Schedule([0], [parse_row("0F0")]), UNIT)
    with pytest.raises(ScheduleError, match=r"stage 0 of .* has no whole backward"):
        _ = timeline.bound


def test_a_recorded_timeline_names_its_unit() -> None:
    # It read "makespan 0.0130112, span 0.0130112".
    simulated = simulate(fpipe.schedules.gpipe(ranks=1, microbatches=1), Cost(0.0123456, 0.2e-3, 0))
    recorded = replace(simulated, cost=None)
    assert repr(recorded) == "<Timeline of gpipe: makespan 12.55 ms, span 12.55 ms>"
    assert repr(simulated) == "<Timeline of gpipe: makespan 0.0125456, span 0.0125456>"


def test_an_empty_timeline_took_no_time() -> None:
    timeline = Timeline(Schedule([0], [[]]), ((),))
    assert (timeline.makespan, timeline.span, timeline.peak) == (0, 0, (0,))
    assert timeline.critical_path == ()
    assert repr(timeline) == "<Timeline of custom: makespan 0 µs, span 0 µs>"


@pytest.mark.parametrize(
    "rows",
    [
        # The bound counted gradients that nobody makes, stood above the makespan, and "proved" it.
        ["0F0 0F1", "1F0 1B0 1F1 1B1"],
        ["0F0 0F1 0W0 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"],
        ["0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1I1"],
        # It did so where one microbatch had less than another.
        ["0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1B1"],
        ["0F0 0W0 0F1 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"],
    ],
)
def test_a_schedule_of_frozen_stages_has_no_training_bound(rows: list[str]) -> None:
    timeline = simulate(Schedule([0, 1], [parse_row(text) for text in rows]), UNIT)
    with pytest.raises(ScheduleError, match=r"stage [01] of .* no whole backward, and the bound"):
        _ = timeline.gap


def test_ranks_without_a_stage_do_not_keep_a_timeline_from_its_bound() -> None:
    rows = [parse_row("0F0 0B0"), parse_row("1F0 1B0")]
    full = simulate(Schedule([0, 1], rows), UNIT)
    for placement, spread in (([0, 2], [rows[0], [], rows[1]]), ([0, 1], [*rows, []])):
        sparse = simulate(Schedule(placement, spread), Cost(f=[1, 1], i=[1, 1], w=[1, 1]))
        assert (sparse.makespan, sparse.bound) == (full.makespan, full.bound)


def test_a_stage_without_a_backward_keeps_nothing() -> None:
    evaluation = simulate(fpipe.schedules.forward_only(ranks=2, microbatches=5), UNIT)
    assert evaluation.peak == (0, 0)
    frozen = Schedule([0, 1], [parse_row("0F0 0F1"), parse_row("1F0 1B0 1F1 1B1")])
    assert simulate(frozen, UNIT).peak == (0, 1)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("schedule", "gpipe", "schedule='gpipe' is a str: it must be a fpipe.Schedule"),
        ("cost", {"f": 1}, r"cost=\{'f': 1\} is a dict: make one with fpipe.Cost"),
        ("events", (), r"events=\(\) must have a tuple of events for each of the 2 ranks"),
        ("events", 7, "events=7 must have"),
    ],
)
def test_what_makes_no_timeline_is_refused(field: str, value: Any, message: str) -> None:
    timeline = simulate(fpipe.schedules.gpipe(ranks=2, microbatches=1), UNIT)
    with pytest.raises(ScheduleError, match=message):
        replace(timeline, **{field: value})


@pytest.mark.parametrize("rank", [2, -1, "0", None])
def test_memory_is_that_of_a_rank(rank: Any) -> None:
    timeline = simulate(fpipe.schedules.gpipe(ranks=2, microbatches=1), UNIT)
    with pytest.raises(ScheduleError, match=f"rank={rank!r} must be from 0 to 1"):
        timeline.memory(rank)


@pytest.mark.parametrize("unit", [b"ms", [], 1])
def test_a_unit_is_text(unit: Any) -> None:
    timeline = simulate(fpipe.schedules.gpipe(ranks=2, microbatches=1), UNIT)
    for draw in (timeline.to_svg, timeline.to_html, timeline.to_trace):
        with pytest.raises(ScheduleError, match="must be text, such as 'ms', or None"):
            draw(unit=unit)
