"""The proof that the programs of all ranks come to their end, before any of them runs."""

from __future__ import annotations

import re

import pytest
import torch

import fpipe
from fpipe import Action, Op, Schedule, ScheduleError, schedules
from fpipe.inputs.signature import Spec
from fpipe.program.order import find_circle, prove
from fpipe.program.program import (
    Bindings,
    Compute,
    Instruction,
    Message,
    Program,
    Recv,
    Results,
    Send,
    WaitRecv,
    WaitSend,
)
from tests.distributed import actors
from tests.distributed.crew import Crew, values


def program(rank: int, *instructions: Instruction) -> Program:
    return Program(rank, instructions, Bindings((), (), (), ()), Results((), ()), 1, {}, {})


def message(action: str, source: int, target: int, number: int = 0) -> Message:
    text, kind = action.split(".")
    stage, _, microbatch = Action.parse(text)
    op = Op.SEND_F if kind == "f" else Op.SEND_B
    return Message(
        number, source, target, Action(stage, op, microbatch), (Spec((2,), torch.float),)
    )


def compute(action: str) -> Compute:
    return Compute(lambda inputs: inputs, (), (), (), Action.parse(action))


# Rank 0 sends 0F0 down and takes 1B0 back; rank 1 the other way round.
DOWN, BACK = message("0F0.f", 0, 1), message("1B0.b", 1, 0)


def test_a_run_that_comes_to_its_end_is_proved() -> None:
    programs = [
        program(0, compute("0F0"), Send(DOWN, ()), Recv(BACK), WaitRecv(BACK, ()), WaitSend(DOWN)),
        program(1, Recv(DOWN), WaitRecv(DOWN, ()), compute("1F0"), Send(BACK, ()), WaitSend(BACK)),
    ]
    assert find_circle(programs) == []
    prove(programs)


def test_two_ranks_that_wait_for_each_other_are_named_with_both_actions() -> None:
    programs = [
        program(0, Recv(BACK), WaitRecv(BACK, ()), compute("0F0"), Send(DOWN, ())),
        program(1, Recv(DOWN), WaitRecv(DOWN, ()), compute("1B0"), Send(BACK, ())),
    ]
    assert sorted(find_circle(programs)) == [(0, 1), (1, 1)]
    said = (
        "these ranks would wait for each other for ever: rank 0 waits before 0F0 for 1SEND_B0 of "
        "rank 1; rank 1 waits before 1B0 for 0SEND_F0 of rank 0. Put the action that is waited for "
        "earlier in its rank's row"
    )
    with pytest.raises(ScheduleError, match=re.escape(said)):
        prove(programs)


def test_a_send_ends_only_once_its_receive_is_posted() -> None:
    """Both wait for their send to be taken before they post: no buffer need lie in between."""
    programs = [
        program(0, compute("0F0"), Send(DOWN, ()), WaitSend(DOWN), Recv(BACK), WaitRecv(BACK, ())),
        program(1, compute("1B0"), Send(BACK, ()), WaitSend(BACK), Recv(DOWN), WaitRecv(DOWN, ())),
    ]
    with pytest.raises(ScheduleError, match="rank 0 waits before its end for rank 1 to take 0SEND"):
        prove(programs)


def test_a_circle_of_three_ranks_without_the_one_that_waits_for_it() -> None:
    ring = [message("0F0.f", 0, 1), message("1F0.f", 1, 2), message("2F0.f", 2, 0)]
    programs = [
        program(
            r, Recv(ring[r - 1]), WaitRecv(ring[r - 1], ()), compute(f"{r}F0"), Send(ring[r], ())
        )
        for r in range(3)
    ]
    tail = message("0F1.f", 0, 3)
    programs[0] = program(0, *programs[0].instructions, compute("0F1"), Send(tail, ()))
    programs.append(program(3, Recv(tail), WaitRecv(tail, ())))
    assert {rank for rank, _ in find_circle(programs)} == {0, 1, 2}


def test_orders_that_differ_on_a_channel() -> None:
    first, second = message("0F0.f", 0, 1), message("0F1.f", 0, 1, 1)
    sender = program(0, Send(first, ()), Send(second, ()), WaitSend(first), WaitSend(second))
    receiver = program(1, Recv(second), Recv(first), WaitRecv(first, ()), WaitRecv(second, ()))
    said = "from rank 0 to rank 1 message 0 is sent as 0SEND_F0 but received as 0SEND_F1"
    with pytest.raises(ScheduleError, match=said):
        prove([sender, receiver])
    with pytest.raises(
        ScheduleError, match="message 1 is sent as 0SEND_F1 but received as nothing"
    ):
        prove([sender, program(1, Recv(first), WaitRecv(first, ()))])


def test_a_schedule_by_hand_that_would_hang_is_refused_with_both_actions_named() -> None:
    def row(text: str) -> list[Action]:
        return [Action.parse(word) for word in text.split()]

    hangs = Schedule([0, 1], [row("0B0 0F0"), row("1F0 1B0")])
    model = actors.model_of("mlp", 2, 2)
    with pytest.raises(ScheduleError, match=r"0B0.*0F0"):
        fpipe.pipeline(model.stages, model.loss, hangs)
    crossed = Schedule([0, 1, 0, 1], [row("0F0 2F0 2B0 0B0"), row("3F0 1F0 1B0 3B0")])
    model = actors.model_of("mlp", 4, 2)
    with pytest.raises(ScheduleError, match=r"rank 0 stops at 2F0.*; rank 1 stops at 3F0"):
        fpipe.pipeline(model.stages, model.loss, crossed)


def test_windows_grow_where_messages_cross(crew: Crew) -> None:
    """Each rank runs all its forwards first, and takes what the other sent only later."""
    far = 12
    stages = range(4)
    order = [Action(s, Op.F, m) for s in stages for m in range(far)]
    order += [Action(s, Op.B, m) for s in reversed(stages) for m in range(far)]
    schedule = Schedule([0, 1, 0, 1], [[a for a in order if a.stage % 2 == r] for r in (0, 1)])
    model = actors.model_of("mlp", 4, far)
    parts = values(crew.run(actors.sent_before_waiting, schedule, far, ranks=range(2)))
    assert parts[0] > 2, "the first window would do, so nothing is tested"
    ours = values(
        crew.run(actors.one_step, "mlp", schedule, far, torch.float64, {}, ranks=range(2))
    )
    expected = actors.pipeline(None, model, schedule).step(model.params, model.batch)
    assert all(torch.equal(part[0].loss, expected.loss) for part in ours)


def test_programs_are_proved_before_the_first_step_and_not_again(crew: Crew) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=2)
    for seen in values(crew.run(actors.proved_first, schedule, ranks=range(2))):
        assert seen[0] == "proved" and seen.count("proved") == 1 and seen.count("ran") > 8
