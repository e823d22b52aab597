"""A rank computes up to its first message while it waits to hear from the others."""

from __future__ import annotations

import pytest

from fpipe import schedules
from fpipe.execute.ahead import prelude
from fpipe.program.program import Instruction, Recv, Send, WaitRecv
from tests.distributed import actors
from tests.distributed.crew import Crew, values
from tests.distributed.test_order import BACK, DOWN, compute, program
from tests.models import assert_identical


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ((Recv(BACK), compute("0F0"), Send(DOWN, ()), compute("0F1")), 2),
        ((compute("0F0"), compute("0B0")), 2),
        ((Recv(DOWN), WaitRecv(DOWN, ()), compute("1F0")), 0),  # nothing to compute before
        ((), 0),
    ],
)
def test_the_prelude_ends_at_the_first_message_that_moves(
    instructions: tuple[Instruction, ...], expected: int
) -> None:
    assert prelude(program(0, *instructions)) == expected


def test_the_first_rank_does_not_wait_for_one_that_comes_late(crew: Crew) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=3)
    first, last = values(crew.run(actors.one_comes_late, schedule, {1: 0.5}, ranks=range(2)))
    assert first.called <= first.computed < last.called
    for entry in (first, last):
        assert entry.right
        assert entry.kernels[0] == entry.kernels[1]  # nothing runs twice


def test_a_rank_that_ran_ahead_starts_again_when_another_one_records(crew: Crew) -> None:
    """What it computed has no marks; a timeline without them would lack its first forward."""
    schedule = schedules.one_f_one_b(ranks=2, microbatches=3)
    _, seen = values(crew.run(actors.one_records, schedule, 1, ranks=range(2)))
    assert seen == [[str(action) for action in row] for row in schedule.actions]


def test_what_is_dropped_has_drawn_nothing(crew: Crew) -> None:
    """The generator went on, so a step that another rank records had another loss."""
    schedule = schedules.one_f_one_b(ranks=2, microbatches=3)
    for before, again in values(crew.run(actors.generators, schedule, 1, ranks=range(2))):
        assert_identical(before, again)
