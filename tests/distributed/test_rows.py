"""Rows of a mesh that share DTensors take a step together, or all of them are told why not."""

from __future__ import annotations

import pytest

from tests.distributed import rows
from tests.distributed.crew import Crew, values

SOON = 15.0


def test_rows_that_are_called_for_something_else_are_told_and_go_on(crew: Crew) -> None:
    for first, shape, turned, method, last in values(crew.run(rows.after_a_known_call)):
        assert first.failure is None
        for outcome, what in (
            (shape, "a batch of another shape"),
            (turned, "parameters that lie otherwise"),
            (method, "another call"),
        ):
            assert f"has {what} than others of the processes" in outcome.error.text
            assert "The pipeline can be used again" in outcome.error.text
        assert last.failure is None


def test_rows_with_other_schedules_are_refused(crew: Crew) -> None:
    for outcome in values(crew.run(rows.another_schedule)):
        assert "has another schedule than others of the processes" in outcome.error.text


@pytest.mark.parametrize("process", [0, 3])
def test_what_one_process_refuses_all_rows_are_told(crew: Crew, process: int) -> None:
    answers = values(crew.run(rows.refused_by_one, process))
    for place, (first, refused, last) in enumerate(answers):
        assert first.failure is None
        if place % 2 != process % 2:  # it is in the other row
            assert "which shares DTensors with this one, takes no step" in refused.error.text
        assert "batch" in refused.error.text
        assert last.failure is None


@pytest.mark.parametrize(
    ("process", "at", "family", "remat"),
    [
        (1, 0, "one_f_one_b", "none"),
        (2, 3, "zb_h1", "full"),
    ],
)
def test_an_exception_in_a_divided_stage_ends_the_step_of_all_rows(
    process: int, at: int, family: str, remat: str
) -> None:
    with Crew(4) as crew:
        answers = values(crew.run(rows.failing, process, "boom", at, family, remat))
    for good, bad, after in answers:
        assert good.failure is None
        assert "boom 42" in bad.error.text
        assert f"failed on rank {process // 2}" in bad.error.text
        assert "make a new process group and a new pipeline" in bad.error.text
        assert bad.seconds < SOON
        assert "boom 42" in after.error.text
        assert after.seconds < 1.0


@pytest.mark.parametrize("deed", ["kill", "interrupt"])
def test_a_process_that_ends_in_a_divided_stage_ends_the_step_of_all_rows(deed: str) -> None:
    with Crew(4) as crew:
        crew.start(rows.failing, 1, deed, 1)
        answers = crew.collect(lost=[1])
    for place, outcome in enumerate(answers):
        if place != 1:
            good, bad, after = outcome.value
            assert good.failure is None
            assert "make a new process group and a new pipeline" in bad.error.text
            assert bad.seconds < SOON
            assert after.failure is not None
