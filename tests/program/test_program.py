"""Programs: readable, every slot freed, every byte counted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from textwrap import dedent
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fpipe
from fpipe import Schedule, schedules
from fpipe.pieces.boxed import Boxed
from fpipe.pieces.partition import Policy, save_all, save_nothing
from fpipe.program import order
from fpipe.program.communication_plan import BEFORE_BURSTS, BURST, DIRECT, Windows
from fpipe.program.interpreter import Run
from fpipe.program.program import (
    Compute,
    Free,
    Instruction,
    Message,
    Program,
    Recv,
    Send,
    WaitRecv,
    WaitSend,
)
from tests.laboratory.random_schedules import schedules as random_schedules
from tests.meter import Meter
from tests.models import Model, apply, assert_same, gpt, mlp, plain_pipeline, rand, unpipelined
from tests.program.lowering import Mailbox, drive, lowered

FAMILIES = list(schedules.FAMILIES)
WINDOWS = [DIRECT, Windows(send=2, receive=3), Windows(send=1, receive=1, nbytes=1000)]


# ── text ────────────────────────────────────────────────────────────────────────────────────────


def test_a_program_can_be_read() -> None:
    stages = [lambda p, x: x * p, lambda p, x: x + p]
    pipe = plain_pipeline(stages, lambda y, _: y.sum(), microbatches=1)
    first, last = pipe.programs([rand(3), rand(3)], rand(2, 3))
    assert str(first) == dedent("""\
        program of rank 0: 8 instructions, 4 slots, peak 96 bytes
          params of stage 0: %1=0
          microbatch 0: %0=0
          0  0F0      %2 <- %0 %1
          1  send     0SEND_F0 0->1 #0 %2
          2  sent     0SEND_F0 0->1 #0
          3  free     %2
          4  post     1SEND_B0 1->0 #0 (48 bytes)
          5  receive  1SEND_B0 1->0 #0 -> %2
          6  0I0      %3 <- %2! %0
          7  0W0      %2 <- %3!
          gradient of params[0] leaf 0: %2""")
    assert str(last) == dedent("""\
        program of rank 1: 8 instructions, 5 slots, peak 96 bytes
          params of stage 1: %0=0
          loss weights: %1=0
          0  post     0SEND_F0 0->1 #0 (48 bytes)
          1  receive  0SEND_F0 0->1 #0 -> %2
          2  1F0      %3 <- %2! %0
          3  1I0      %2 %4 <- %1
          4  send     1SEND_B0 1->0 #0 %2
          5  sent     1SEND_B0 1->0 #0
          6  free     %2
          7  1W0      %2 <- %4!
          gradient of params[1] leaf 0: %2
          output leaf 0 of microbatch 0: %3""")


def test_marks_and_results_in_the_text() -> None:
    model = mlp(1, 2)
    (program,) = lowered(model, schedules.gpipe(ranks=1, microbatches=2))
    assert re.fullmatch(
        r"<Program of rank \d: \d+ instructions, at most [\d,]+ bytes; .*>", f"{program!r}"
    )
    lines = str(program).splitlines()
    assert lines[0].startswith("program of rank 0: 4 instructions, ")
    assert f"peak {program.peak_bytes:,} bytes" in lines[0]
    assert any(line.startswith("  loss weights: ") for line in lines)
    assert any("0B1" in line and "!" in line for line in lines)
    assert "gradient of params[0] leaf 0: %" in lines[-4]
    assert "output leaf 0 of microbatch 1: %" in lines[-1]


# ── slots ───────────────────────────────────────────────────────────────────────────────────────


def touched(instruction: Instruction) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """The slots that an instruction reads, frees and fills."""
    match instruction:
        case Compute(inputs=inputs, last_use=last_use, outputs=outputs):
            return inputs, last_use, [slot for slot in outputs if slot >= 0]
        case Send(slots=slots):
            return slots, (), ()
        case WaitRecv(slots=slots):
            return (), (), slots
        case Free(slots=slots):
            return slots, slots, ()
        case _:
            return (), (), ()


def check_slots(program: Program) -> None:
    """Nothing is read that is not there, nothing overwritten, and only results stay."""
    bindings = program.bindings
    bound = [entry[-1] for group in bindings for entry in group]
    assert len(set(bound)) == len(bound)
    live = set(bound)
    for instruction in program.instructions:
        reads, frees, fills = touched(instruction)
        assert live >= set(reads) >= set(frees)
        live -= set(frees)
        assert live.isdisjoint(fills)
        assert len(set(fills)) == len(fills)
        live |= set(fills)
    results = [entry[-1] for group in program.results for entry in group]
    assert live == set(bound) | set(results)
    assert max(live, default=-1) < program.num_slots


def check_mail(programs: Sequence[Program]) -> None:
    """Each channel's messages are sent and posted in one order, and each is received once."""
    sent: dict[tuple[int, int], list[Message]] = {}
    posted: dict[tuple[int, int], list[Message]] = {}
    for program in programs:
        open_posts: set[Message] = set()
        open_sends: set[Message] = set()
        for instruction in program.instructions:
            match instruction:
                case Send(message=message):
                    assert message.source == program.rank
                    sent.setdefault(message[1:3], []).append(message)
                    open_sends.add(message)
                case WaitSend(message=message):
                    open_sends.remove(message)
                case Recv(message=message):
                    assert message.target == program.rank
                    posted.setdefault(message[1:3], []).append(message)
                    open_posts.add(message)
                case WaitRecv(message=message):
                    open_posts.remove(message)
        assert not open_posts
        assert not open_sends
    assert sent == posted
    for messages in sent.values():
        assert [message.number for message in messages] == list(range(len(messages)))


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_slots_and_mail_of_every_family(family: str, windows: Windows) -> None:
    schedule = schedules.get(family, ranks=3, microbatches=3)
    programs = lowered(mlp(schedule.num_stages, 3), schedule, windows)
    for program in programs:
        check_slots(program)
    check_mail(programs)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(random_schedules(), st.sampled_from(WINDOWS))
def test_slots_and_mail_of_any_valid_order(schedule: Schedule, windows: Windows) -> None:
    model = mlp(schedule.num_stages, schedule.num_microbatches, width=2)
    programs = lowered(model, schedule, windows)
    for program in programs:
        check_slots(program)
    check_mail(programs)


def test_small_messages_run_ahead() -> None:
    """As many are under way on a channel as fit into the bytes that the windows allow."""
    schedule = schedules.gpipe(ranks=2, microbatches=8)
    model = mlp(2, 8)
    size = next(
        i.message.nbytes for i in lowered(model, schedule)[0].instructions if isinstance(i, Send)
    )
    for number in (1, 3, 8):
        first, last = lowered(model, schedule, Windows(1, 0, number * size))
        assert under_way(first, Send, WaitSend) == number
        # Beside the one that the running task reads.
        assert under_way(last, Recv, WaitRecv) == number - 1


def test_receives_are_posted_in_bursts() -> None:
    """To post one wakes the sender, in the midst of a step for each message: 1F1B took a sixth
    longer. The first message does not wait for those of a long step."""
    schedule = schedules.gpipe(ranks=2, microbatches=5 * BURST // 2)
    first, last = lowered(mlp(2, 5 * BURST // 2), schedule, Windows(1, 0, nbytes=1 << 20))
    assert posted_at(last) == {0: 2 * BURST, BURST: BURST // 2}
    # Whose first actions do not wait sends what the other one waits for before it posts.
    assert posted_at(first)[BEFORE_BURSTS] == 2 * BURST


def posted_at(program: Program) -> dict[int, int]:
    """How many messages are posted after how many tasks."""
    found: dict[int, int] = {}
    tasks = 0
    for instruction in program.instructions:
        if isinstance(instruction, Recv):
            found[tasks] = found.get(tasks, 0) + 1
        tasks += isinstance(instruction, Compute)
    return found


def test_messages_run_ahead_as_far_as_a_share_of_the_peak_allows() -> None:
    """A rank that computes posts nothing, and who sends to it would wait: both ranks of LoopedBFS
    lost a sixth of a step so."""
    schedule = schedules.looped_bfs(ranks=2, microbatches=8, stages_per_rank=2)
    model = mlp(4, 8)
    ahead, peak = {}, {}
    for share in (0, 1 / 4):
        with patch.multiple(order, RUN_AHEAD=0, SHARE=share):
            programs = order.lower_for_group(partial(lowered, model, schedule), schedule)
        ahead[share] = [under_way(program, Recv, WaitRecv) for program in programs]
        peak[share] = max(program.peak_bytes for program in programs)
    assert all(few < many for few, many in zip(ahead[0], ahead[1 / 4], strict=True))
    assert peak[1 / 4] <= (1 + 2 / 4) * peak[0]  # one channel in, one out


def under_way(program: Program, start: type, end: type) -> int:
    """How many messages were begun and not awaited while a task ran."""
    level = peak = 0
    for instruction in program.instructions:
        if isinstance(instruction, Compute):
            peak = max(peak, level)
        level += isinstance(instruction, start) - isinstance(instruction, end)
    return peak


# ── bytes ───────────────────────────────────────────────────────────────────────────────────────


class Counting(Mailbox):
    """Counts the bytes of one rank: slots, posted buffers, and what kernels hold as they run."""

    def __init__(self, mail: dict[Message, Sequence[Tensor]]) -> None:
        super().__init__(mail)
        self.peak = 0
        self._open: list[Message] = []

    def attach(self, run: Run) -> None:
        self._slots = run.slots
        self._callers = {id(value) for value in run.slots if value is not None}

    def send(self, message: Message, values: Sequence[Tensor]) -> None:
        # As over a wire: the sender's own values are gone when it lets go of them.
        super().send(message, [value.clone() for value in values])

    def post(self, message: Message) -> None:
        super().post(message)
        self._open.append(message)
        self.count()

    def receive(self, message: Message) -> Sequence[Tensor] | None:
        values = super().receive(message)
        if values is not None:
            assert [value.nbytes for value in values] == [spec.nbytes for spec in message.specs]
            self._open.remove(message)
            self.count(values)
        return values

    def run(self, call: Boxed, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Run a kernel, which lets go of its inputs as it likes."""
        before = self.held(inputs)
        meter = Meter(inputs)
        with meter:
            outputs = call(inputs)
        self.peak = max(self.peak, before + meter.peak)
        return outputs

    def count(self, *more: Sequence[Tensor]) -> None:
        self.peak = max(self.peak, self.held(*more))

    def held(self, *more: Sequence[Tensor]) -> int:
        found = {id(v): v for values in (self._slots, *more) for v in values if v is not None}
        slots = sum(value.nbytes for key, value in found.items() if key not in self._callers)
        return slots + sum(message.nbytes for message in self._open)


# Every family with every window; policies take turns.
@pytest.mark.parametrize(
    ("family", "windows", "policy"),
    [
        (family, windows, (save_all, save_nothing)[(row + column) % 2])
        for row, family in enumerate(["gpipe", "zb_h1", "interleaved_1f1b", "zbv"])
        for column, windows in enumerate(WINDOWS)
    ],
)
def test_peak_is_what_a_run_holds(family: str, windows: Windows, policy: Policy) -> None:
    schedule = schedules.get(family, ranks=2, microbatches=4)
    # In float64 torch before 2.13 tells another dtype of what attention keeps than it has.
    model = gpt(schedule.num_stages, 4, torch.float32)
    programs = lowered(model, schedule, windows, policy)
    mail: dict[Message, Sequence[Tensor]] = {}
    counters = [Counting(mail) for _ in programs]
    drive(programs, model, counters, lambda rank, *kernel: counters[rank].run(*kernel))
    assert [counter.peak for counter in counters] == [program.peak_bytes for program in programs]


def test_remat_and_1f1b_lower_the_peak() -> None:
    model = gpt(2, 8)
    gpipe, steady = (f(ranks=2, microbatches=8) for f in (schedules.gpipe, schedules.one_f_one_b))
    everything = lowered(model, gpipe)[0].peak_bytes
    assert lowered(model, steady)[0].peak_bytes < everything / 2
    assert lowered(model, gpipe, policy=save_nothing)[0].peak_bytes < everything / 2


# ── routes ──────────────────────────────────────────────────────────────────────────────────────


def sends(programs: Sequence[Program]) -> list[tuple[str, int, int, int]]:
    return [
        (str(i.message.action), i.message.source, i.message.target, len(i.slots))
        for program in programs
        for i in program.instructions
        if isinstance(i, Send)
    ]


def test_value_passed_on_goes_straight_to_its_reader() -> None:
    """A stage between neither receives it nor its gradient."""

    def first(p: Tensor, x: Tensor) -> dict[str, Tensor]:
        return {"h": x * p, "skip": x + p}

    def middle(p: Tensor, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**x, "h": torch.tanh(x["h"] * p)}

    def last(p: Tensor, x: dict[str, Tensor]) -> Tensor:
        return x["h"] * x["skip"] * p

    stages: list[Any] = [first, middle, middle, last]
    params, x = [rand(3)] * 4, rand(2, 3)
    pipe = plain_pipeline(stages, lambda y, _: y.sum(), microbatches=1)
    assert sorted(sends(pipe.programs(params, x))) == [
        ("0SEND_F0", 0, 1, 1),
        ("0SEND_F0", 0, 3, 1),
        ("1SEND_B0", 1, 0, 1),
        ("1SEND_F0", 1, 2, 1),
        ("2SEND_B0", 2, 1, 1),
        ("2SEND_F0", 2, 3, 1),
        ("3SEND_B0", 3, 0, 1),
        ("3SEND_B0", 3, 2, 1),
    ]
    step = pipe.step(params, x)
    assert_same(step, unpipelined(stages, lambda y, _: y.sum(), params, x))


def test_no_message_within_a_rank() -> None:
    model = mlp(3, 2)
    schedule = Schedule([0, 0, 0], [one_after_the_other(3)])
    (program,) = lowered(model, schedule)
    assert all(isinstance(instruction, Compute) for instruction in program.instructions)


def one_after_the_other(stages: int) -> list[fpipe.Action]:
    words = [f"{stage}F0" for stage in range(stages)]
    words += [f"{stage}B0" for stage in reversed(range(stages))]
    return [fpipe.Action.parse(word) for word in words]


def test_gradients_of_batch_leaves_and_integers_are_never_sent() -> None:
    def first(p: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, (x > 0).long(), x * p

    def last(p: Tensor, x: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return (x[0] + x[1] * x[2]) * p

    pipe = plain_pipeline([first, last], lambda y, _: y.sum(), microbatches=1)
    assert sends(pipe.programs([rand(3), rand(3)], rand(2, 3))) == [
        ("0SEND_F0", 0, 1, 2),  # the batch leaf is there already
        ("1SEND_B0", 1, 0, 1),
    ]


def test_output_that_a_stage_passes_on_reaches_the_last_rank() -> None:
    stages = [lambda p, x: (x * p, x), lambda p, x: (x[0] * p, x[0], x[1])]
    pipe = plain_pipeline(stages)
    params, x = [rand(3), rand(3)], rand(4, 3)
    assert_same(pipe.forward(params, x), apply(stages, params, x))


def test_models_of_one_rank_run_on_any_transport() -> None:
    model: Model = mlp(2, 4)
    programs = lowered(model, schedules.one_f_one_b(ranks=2, microbatches=4))
    mail = Mailbox()
    drive(programs, model, [mail, mail])
    assert len(mail.posted) == len(mail.sent) == len(mail.waited) == 8


def test_a_part_of_a_value_does_not_keep_the_whole_alive() -> None:
    # A slice of rows is a contiguous view, which holds the memory of all rows.
    def first(p: Tensor, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(x * p)
        return {"top": h[:1], "rest": h[1:].sum(0)}

    def last(p: Tensor, x: dict[str, Tensor]) -> Tensor:
        return torch.tanh(torch.cat([x["top"], x["rest"][None]]) * p)

    held: list[Tensor] = []

    def compile(module: torch.fx.GraphModule, examples: object) -> Any:
        def call(inputs: list[Tensor]) -> Any:
            outputs = module(*inputs)
            held.extend(v for v in outputs if v.untyped_storage().nbytes() != v.nbytes)
            return outputs

        return call

    pipe = plain_pipeline([first, last], lambda y, _: y.sum(), compile=compile)
    pipe.step([rand(3), rand(3)], rand(8, 3))
    assert not held
