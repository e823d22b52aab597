"""The schedule as a value."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fpipe
from fpipe import Action, Op, Schedule, ScheduleError, verify

ROW = (Action(0, Op.F, 0), Action(0, Op.B, 0))
ODD: Any = Action  # takes fields of any type


def test_it_is_a_value() -> None:
    schedule = Schedule([0], [list(ROW)], name="mine")
    assert schedule == Schedule((0,), (ROW,), name="another")  # the name is for people
    assert hash(schedule) == hash(Schedule((0,), (ROW,)))
    assert schedule != Schedule([0], [ROW[:1]])
    assert replace(schedule, name="edited").actions == schedule.actions
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    with pytest.raises(FrozenInstanceError):
        schedule.name = "changed"  # type: ignore[misc]


def test_it_keeps_numbers_of_numpy_as_plain_ones() -> None:
    zero: Any = np.int64(0)
    whole = Action(0, Op.REDUCE_GRAD, None)
    given = Schedule([zero], [[Action(zero, Op.F, 0), Action(0, Op.B, zero), whole]])
    plain = Schedule([0], [[*ROW, whole]])
    assert given == plain and repr((given.placement, given.actions)) == repr(((0,), plain.actions))
    assert given.num_microbatches == 1
    assert given.to_json() == plain.to_json()
    verify(given)


def test_it_keeps_truth_values_as_integers() -> None:
    """They print as words, which no file of a schedule may have."""
    given = Schedule([False], [[Action(0, Op.F, False), Action(False, Op.B, 0)]])
    assert given == Schedule([0], [ROW]) and given.to_text().splitlines()[1:] == [
        "placement 0",
        "rank 0: 0F0 0B0",
    ]
    assert Schedule.from_text(given.to_text()) == given


def test_it_keeps_ops_that_are_text_as_ops() -> None:
    text: Any = "F"
    ((action,),) = Schedule([0], [[Action(0, text, 0)]]).actions
    assert type(action.op) is Op


def test_its_hash_is_made_where_it_is_asked_for() -> None:
    # A hash that came with a pickle was that of a process which hashes text in another way.
    schedule = Schedule([0], [ROW])
    assert schedule in {schedule} and schedule.num_microbatches == 1
    assert vars(pickle.loads(pickle.dumps(schedule))).keys() == {"placement", "actions", "name"}


def test_what_it_tells() -> None:
    schedule = Schedule([0, 1, 0], [ROW, [Action(1, Op.I, 4)]], name="mine")
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (2, 3, 5)
    assert schedule.stages_of(0) == (0, 2)
    assert schedule.stages_of(1) == (1,)
    assert schedule.splits_backward
    assert not Schedule([0], [ROW]).splits_backward
    assert repr(schedule) == "<Schedule mine: 2 ranks, 3 stages, 5 microbatches>"
    assert str(schedule).startswith("mine: 2 ranks, 3 stages, 5 microbatches\n")
    assert repr(Schedule([0], [ROW])) == "<Schedule custom: 1 rank, 1 stage, 1 microbatch>"
    assert Schedule([0], [[Action(0, Op.UNSHARD, None)]]).num_microbatches == 0


@pytest.mark.parametrize(
    ("placement", "actions", "text"),
    [
        ([], [ROW], r"placement=\(\) with 1 ranks: a schedule needs at least one stage"),
        ([0], [], r"placement=\(0,\) with 0 ranks"),
        ([0, 2], [ROW, []], r"placement\[1\]=2 must be a rank from 0 to 1"),
        ([0.0], [ROW], r"placement\[0\]=0.0 must be a rank from 0 to 0"),
        ([-1], [ROW], r"placement\[0\]=-1 must be a rank"),
        (["0"], [ROW], r"placement\[0\]='0' must be a rank"),
        ([0], [["0F0"]], r"actions\[0\]\[0\]='0F0' must be a fpipe.Action; .*parse\('2F0'\)"),
        (0, [ROW], r"placement=0 is an int: it must be a sequence with the rank of each stage"),
        ([0], 0, r"actions=0 is an int: it must be a sequence with the actions of each rank"),
        ([0], [ROW, None], r"actions\[1\]=None is a NoneType: .* with the actions of a rank"),
        # Of a dict its keys were taken, whatever ranks it gave its stages.
        ({0: 1, 1: 0}, [ROW, ROW], r"placement=\{0: 1, 1: 0\} is a dict: it must be a sequence"),
        ([0], {0: ROW}, r"actions=\{0: .* is a dict: it must be a sequence"),
        ([0], [set(ROW)], r"actions\[0\]=.* is a set: it must be a sequence"),
        ([0], [[ROW[0], (0, "B", 0)]], r"actions\[0\]\[1\]=\(0, 'B', 0\) must be"),
        # Pictures, the text form and the hash failed on these, each in its own way.
        ([0], [[ODD([], Op.F, 0)]], r"actions\[0\]\[0\] has stage=\[\]: it must be the number"),
        ([0], [[ODD(0.0, Op.F, 0)]], r"actions\[0\]\[0\] has stage=0.0: it must be the number"),
        ([0], [[ODD(0, "X", 0)]], r"\[0\] has op='X': it must be one of F, B, I, W"),
        ([0], [[ODD(0, 7, 0)]], r"\[0\] has op=7: it must be one of F, B, I, W"),
        (
            [0],
            [[ROW[0], ODD(0, Op.B, "0")]],
            r"actions\[0\]\[1\] has microbatch='0': it must be",
        ),
    ],
)
def test_its_form_is_checked(placement: Any, actions: Any, text: str) -> None:
    with pytest.raises(ScheduleError, match=text):
        Schedule(placement, actions)


def test_a_name_of_several_lines_stays_in_the_line_that_names_it() -> None:
    schedule = Schedule([0], [ROW], name="two\nlines")
    assert repr(schedule).startswith(r"<Schedule 'two\nlines': 1 rank")
    assert repr(fpipe.Timeline(schedule, ((),))).startswith(r"<Timeline of 'two\nlines': makespan")


def test_its_name_is_text() -> None:
    with pytest.raises(ScheduleError, match="name=3 is an int: it must be text"):
        Schedule([0], [ROW], name=3)  # type: ignore[arg-type]


def test_text_is_read_from_text() -> None:
    with pytest.raises(ScheduleError, match=r"is a PosixPath: give the lines .*read_text"):
        Schedule.from_text(Path("a.txt"))  # type: ignore[arg-type]
