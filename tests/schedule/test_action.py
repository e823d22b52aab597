"""Actions and their text form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpipe import Action, Op, ScheduleError
from fpipe.schedule import WHOLE_STAGE_OPS


@given(st.integers(0, 10**6), st.sampled_from(Op), st.integers(0, 10**6))
def test_text_form_is_read_back(stage: int, op: Op, microbatch: int) -> None:
    action = Action(stage, op, None if op in WHOLE_STAGE_OPS else microbatch)
    assert Action.parse(str(action)) == action
    assert Action.parse(f"  {action}\n") == action


def test_an_op_is_its_text() -> None:
    assert Action(2, "F", 0) == Action(2, Op.F, 0)  # type: ignore[arg-type]
    assert hash(Action(2, "F", 0)) == hash(Action(2, Op.F, 0))  # type: ignore[arg-type]
    assert str(Action(2, "F", 0)) == "2F0"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["", "F0", "2X0", "2f0", "2 F 0", "2F0 3", "2F-1", "-2F0", "2SEND0", "٢F0", "2F0_"]
)
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"is not an action: it must be a stage, an op and a"):
        Action.parse(text)


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ScheduleError, match="text=3 is not an action"):
        Action.parse(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "fault"),
    [("2F", "F with no microbatch"), ("2UNSHARD0", "UNSHARD with a microbatch")],
)
def test_a_microbatch_belongs_to_compute_and_messages_only(text: str, fault: str) -> None:
    with pytest.raises(ScheduleError, match=f"text='{text}' is not an action: {fault}"):
        Action.parse(text)
