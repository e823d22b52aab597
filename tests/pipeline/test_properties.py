"""Whatever `fpipe.verify` accepts runs, and is right; whatever it refuses is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import fpipe
from fpipe import Action, Schedule, ScheduleError
from fpipe.pieces.partition import NAMES
from tests.laboratory.random_schedules import schedules
from tests.models import Model, apply, assert_same, mlp, unpipelined

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def pipeline_of(
    schedule: Schedule, extra_rows: int, **options: Any
) -> tuple[fpipe.Pipeline, Model]:
    model = mlp(schedule.num_stages, schedule.num_microbatches + extra_rows, width=2)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, compile=False, **options)
    return pipe, model


@settings(SLOW, max_examples=25)
@given(schedules(), st.integers(0, 4), st.sampled_from(NAMES))
def test_any_placement_and_any_valid_order_gives_the_gradients(
    schedule: Schedule, extra_rows: int, remat: str
) -> None:
    fpipe.verify(schedule)
    pipe, model = pipeline_of(schedule, extra_rows, remat=remat)
    assert_same(pipe.step(model.params, model.batch), unpipelined(*model))


@settings(SLOW, max_examples=8)
@given(schedules(), st.integers(0, 4))
def test_any_placement_and_any_valid_order_evaluates(schedule: Schedule, extra_rows: int) -> None:
    pipe, model = pipeline_of(schedule, extra_rows)
    output = apply(model.stages, model.params, model.batch)
    assert_same(pipe.forward(model.params, model.batch), output)
    assert_same(pipe.value(model.params, model.batch), model.loss(output, model.batch))


@st.composite
def edits(draw: st.DrawFn) -> Schedule:
    """A schedule in which something was moved, lost, doubled or replaced."""
    schedule = draw(schedules())
    rows = [list(row) for row in schedule.actions]
    rank = draw(st.sampled_from([rank for rank, row in enumerate(rows) if row]))
    row = rows[rank]
    place = draw(st.integers(0, len(row) - 1))
    match draw(st.sampled_from(["move", "lose", "double", "replace", "send"])):
        case "move":
            row.insert(draw(st.integers(0, len(row) - 1)), row.pop(place))
        case "lose":
            del row[place]
        case "double":
            row.insert(draw(st.integers(0, len(row))), row[place])
        case "replace":
            op = draw(st.sampled_from([fpipe.Op.F, fpipe.Op.B, fpipe.Op.I, fpipe.Op.W]))
            row[place] = Action(row[place].stage, op, row[place].microbatch)
        case "send":
            rows[draw(st.integers(0, len(rows) - 1))].append(row.pop(place))
    return Schedule(schedule.placement, rows)


@settings(SLOW, max_examples=40)
@given(edits())
@example(Schedule((0,), [[Action(0, fpipe.Op.F, 0)]]))
def test_an_edited_schedule_is_refused_or_right(schedule: Schedule) -> None:
    evaluates = all(action.op == fpipe.Op.F for row in schedule.actions for action in row)
    try:
        fpipe.verify(schedule)
    except ScheduleError as error:
        # The gradient of the first stage's input, which `verify` asks for, is nobody's.
        owed = "F" if evaluates else ["FW", *["FIW"] * (schedule.num_stages - 1)]
        try:
            fpipe.verify(schedule, owed)
        except ScheduleError as other:
            with pytest.raises(ScheduleError) as caught:
                pipeline_of(schedule, 0)
            assert str(caught.value) == str(other if evaluates else error)
            return
    pipe, model = pipeline_of(schedule, 1)
    if evaluates:
        assert_same(pipe.value(model.params, model.batch), unpipelined(*model).loss)
        return
    assert_same(pipe.step(model.params, model.batch), unpipelined(*model))
