"""Run ahead: what a rank computes before it has heard what the other ranks were called with.

    header ──► from and to all ranks ──────────────┐
    0F0 0F1 … up to the first message of the step ─┴─► agreed ──► the messages, and the rest

A program computes until it needs a message or has one to send. None of that can be seen outside but
torch's generator, so if the ranks agree on anything else than expected, it is dropped and the
generator put back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fpipe.plan.plan import Plan
from fpipe.program.interpreter import Run, Transport
from fpipe.program.program import Compute, Message, Program, Send, WaitRecv
from fpipe.random.torch_draws import generators


class HeldTransport:
    """A transport that moves nothing yet.

    Attributes:
        posted: the messages to post later.
    """

    def __init__(self) -> None:
        self.posted: list[Message] = []

    def post(self, message: Message) -> None:
        self.posted.append(message)

    def send(self, message: Message, values: Sequence[Tensor]) -> None:
        raise AssertionError(f"{message.action} is sent before the ranks agreed")

    def wait_sent(self, message: Message) -> None:
        raise AssertionError(f"{message.action} is waited for before the ranks agreed")

    def receive(self, message: Message) -> Sequence[Tensor] | None:
        raise AssertionError(f"{message.action} is received before the ranks agreed")


def prelude(program: Program) -> int:
    """How many instructions run before the first message moves; 0 if none of them computes."""
    instructions = program.instructions
    moving = (i for i, step in enumerate(instructions) if isinstance(step, Send | WaitRecv))
    end = next(moving, len(instructions))
    return end if any(isinstance(step, Compute) for step in instructions[:end]) else 0


class Ahead:
    """A run that has gone as far as it can alone.

    Args:
        plan: that is expected.
        run: of this rank's program, loaded.
        until: the length of its program's prelude, as far as it goes now.
        device: where it computes.

    Attributes:
        plan: as given.
        run: as given, at its first message or at the instruction that failed.
    """

    def __init__(self, plan: Plan, run: Run, until: int, device: torch.device) -> None:
        self.plan = plan
        self.run = run
        self._held = HeldTransport()
        self._error: Exception | None = None
        self._generators = generators([device])
        self._states = [generator.get_state() for generator in self._generators]
        try:
            run.advance(self._held, until)
        except Exception as error:
            self._error = error

    def drop(self) -> None:
        """Leave everything as it was."""
        self.run.slots.clear()
        self._error = None  # which holds the values of the kernel that failed
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)

    def join(self, transport: Transport) -> None:
        """Do what had to wait for the other ranks.

        Raises:
            PipelineError: what failed on the way.
        """
        for message in self._held.posted:
            transport.post(message)
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # with its traceback this frame would keep itself, and the run
