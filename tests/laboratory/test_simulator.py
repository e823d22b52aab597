"""The simulator: exact against a slow one on random schedules, and honest about what cannot run."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fpipe
from fpipe import Action, Cost, Op, Schedule, ScheduleError, simulate
from tests.laboratory.random_schedules import costs, schedules, tick_by_tick
from tests.schedule.rows import parse_row

UNIT = Cost(f=1, i=1, w=1)


@settings(max_examples=150)
@given(data=st.data())
def test_it_agrees_with_a_simulator_that_looks_at_every_tick(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    shape = schedule.num_stages, schedule.num_ranks, schedule.num_microbatches
    cost = data.draw(costs(*shape))
    timeline = simulate(schedule, cost)
    expected = tick_by_tick(schedule, cost)
    assert {e.action: (e.start, e.end) for row in timeline.events for e in row} == expected
    assert timeline.makespan == max(end for _, end in expected.values())
    fpipe.verify(schedule)


def test_times_of_1f1b_on_two_ranks() -> None:
    # rank 0: F0 F1 . . B0 B0 F2 B1 B1 . B2 B2
    # rank 1: . F0 B0 B0 F1 B1 B1 F2 B2 B2
    timeline = simulate(fpipe.schedules.one_f_one_b(ranks=2, microbatches=3), UNIT)
    assert [event[1:] for event in timeline.events[0]] == [
        (Action(0, Op.F, 0), 0, 1),
        (Action(0, Op.F, 1), 1, 2),
        (Action(0, Op.B, 0), 4, 6),
        (Action(0, Op.F, 2), 6, 7),
        (Action(0, Op.B, 1), 7, 9),
        (Action(0, Op.B, 2), 10, 12),
    ]
    assert [event.start for event in timeline.events[1]] == [1, 2, 4, 5, 7, 8]


def test_latency_delays_the_reader_and_occupies_nobody() -> None:
    timeline = simulate(fpipe.schedules.gpipe(ranks=2, microbatches=2), Cost(1, 1, 1, comm=5))
    assert [event.start for event in timeline.events[1]] == [6, 7, 8, 10]
    assert [event.start for event in timeline.events[0]] == [0, 1, 15, 17]


def test_latency_of_each_pair_and_none_on_one_rank() -> None:
    schedule = Schedule([0, 1, 1, 0], [parse_row("0F0 3F0 3B0 0B0"), parse_row("1F0 2F0 2B0 1B0")])
    timeline = simulate(schedule, Cost(2, 2, 2, comm=[[0, 10], [20, 0]]))
    assert [event.start for event in timeline.events[1]] == [11, 12, 46, 48]
    assert [event.start for event in timeline.events[0]] == [0, 33, 34, 70]


def test_whole_stage_actions_take_no_time() -> None:
    plain = Schedule([0], [parse_row("0F0 0B0")])
    whole = Schedule([0], [parse_row("0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD")])
    assert simulate(whole, UNIT).makespan == simulate(plain, UNIT).makespan == 3
    assert simulate(whole, UNIT).peak == (1,)


def test_stages_that_owe_less_run_too() -> None:
    evaluation = Schedule([0, 1], [parse_row("0F0 0F1"), parse_row("1F0 1F1")])
    assert simulate(evaluation, UNIT).makespan == 3
    # Stage 0 is the first that is trained: its W is its whole backward and waits for stage 1.
    frozen = Schedule([0, 1], [parse_row("0F0 0W0"), parse_row("1F0 1I0 1W0")])
    timeline = simulate(frozen, Cost(1, 1, 1, comm=2))
    assert [event.start for event in timeline.events[0]] == [0, 7]
    assert timeline.peak == (1, 1)
    assert timeline.memory(0)[-1] == (8, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["0F0 0B0", "1B0 1F0"], "rank 1 runs 1B0"),
        (["0F1 0B0 0F0 0B1", "1F0 1F1 1B0 1B1"], "0B0"),
        (["0F0 0F0 0B0", "1F0 1B0"], "0F0"),
        (["0F0 0F1 0B0 0B1", "1F0 1B0 1F1"], "1"),
        (["0F0 0B0 1F0", "1B0"], "is on rank 0"),
        (["0F0 0W0 0I0", "1F0 1I0 1W0"], "0W0"),
        (["0F0 0SEND_F0 0B0", "1F0 1B0"], "0SEND_F0"),
        (["0F0 0B0 0RESHARD", "1F0 1B0"], "stage 0 is resharded"),
        # The words were of `requires`, which nobody gave.
        (["0F0 0B0", "1F0"], r"stage 1 has F on microbatch 0 \(rank 1\): it owes F\+I or F\+B"),
        # As much work with every microbatch, which is none.
        (["0F0 0F1", ""], r"stage 1 has nothing on microbatch 0 \(rank 1\)"),
        (["", ""], "actions names no microbatch"),
    ],
)
def test_what_cannot_run_is_refused_with_the_verifiers_words(rows: list[str], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(Schedule([0, 1], [parse_row(text) for text in rows]), UNIT)


def test_a_rank_without_a_stage_counts_wherever_it_is() -> None:
    """A plain number is for 1/p of the model, and p counted no rank behind the last stage."""
    last = Schedule([0, 1], [parse_row("0F0 0B0"), parse_row("1F0 1B0"), []])
    middle = Schedule([0, 2], [parse_row("0F0 0B0"), [], parse_row("1F0 1B0")])
    first, second = (simulate(schedule, UNIT) for schedule in (last, middle))
    assert first.makespan == second.makespan == 9
    assert first.peak == (1.5, 1.5, 0) and second.peak == (1.5, 0, 1.5)
    assert first.bound == second.bound == 7.5


def test_a_frozen_stage_may_have_an_i_of_one_microbatch_and_a_b_of_another() -> None:
    schedule = Schedule([0, 1], [parse_row("0F0 0F1 0B0 0B1"), parse_row("1F0 1I0 1F1 1B1")])
    fpipe.verify(schedule, requires=["FIW", "FI"])
    assert simulate(schedule, UNIT).makespan == 8


def test_whole_stage_actions_may_stand_beside_backwards_of_any_form() -> None:
    rows = [
        parse_row("0UNSHARD 0F0 0F1 0F2 0W0 0I1 0W1 0B2 0RESHARD"),
        parse_row("1F0 1B0 1F1 1B1 1F2 1B2"),
    ]
    fpipe.verify(Schedule([0, 1], rows), requires=["FW", "FIW"])
    assert simulate(Schedule([0, 1], rows), UNIT).makespan == 12


def test_a_circle_of_forwards_is_refused_as_a_circle() -> None:
    # Rank 0 wants stage 2 of microbatch 0 first, which waits for its own stage 0.
    circle = Schedule([0, 1, 0], [parse_row("2F0 0F0"), parse_row("1F0")])
    with pytest.raises(ScheduleError, match="2F0"):
        simulate(circle, UNIT)


def test_a_hundred_thousand_actions_take_a_fraction_of_a_second() -> None:
    schedule = fpipe.schedules.zb_h1(ranks=16, microbatches=2100)
    start = time.process_time()
    assert simulate(schedule, UNIT).makespan == 2100 * 3 + 15
    assert time.process_time() - start < 10  # many times what it takes, for busy machines


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (Action(0, Op.F, None), "0F .* has microbatch=None"),  # it took no time
        (Action(0, Op.F, -1), "has microbatch=-1"),
        # Its tables would have taken 300 TB.
        (Action(0, Op.F, 10**13), "has nothing on microbatch 0"),
    ],
)
def test_an_action_that_has_no_place_is_refused(action: Action, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(Schedule([0], [[action]]), UNIT)


def test_what_is_no_schedule_is_refused() -> None:
    with pytest.raises(
        ScheduleError, match=r"schedule='zbv' is a str: it must be a fpipe.Schedule"
    ):
        simulate("zbv", UNIT)  # type: ignore[arg-type]
