"""The interpreter: one short loop over a Program."""

from __future__ import annotations

from typing import Any

from fpipe.errors import PipelineError, told
from fpipe.program.program import Compute, Free, Program, Recv, Send, WaitRecv
from fpipe.program.transport import ConnectionLost, Interrupted, Transport


class Run:
    """One rank on its way through its program.

    Attributes:
        program: what it runs.
        slots: the registers; filled by the caller according to the program's bindings, and read
            afterwards according to its results.
        next: index of the next instruction, or of the one that failed.
    """

    __slots__ = ("next", "program", "slots")

    def __init__(self, program: Program) -> None:
        self.program = program
        self.slots: list[Any] = [None] * program.num_slots
        self.next = 0

    def advance(self, transport: Transport, until: int | None = None) -> bool:
        """Run instructions until the program ends (True) or a message is missing (False).

        Args:
            transport: moves the messages.
            until: index of the first instruction not to run, None for all of them.

        Raises:
            PipelineError: a kernel raised; names rank, stage, microbatch and action, and carries
                the original error as its cause.
        """
        instructions = self.program.instructions
        slots = self.slots
        start = index = self.next
        end = len(instructions) if until is None else until
        try:
            for index in range(start, end):
                instruction = instructions[index]
                if isinstance(instruction, Compute):
                    call, inputs, last_use, outputs, _ = instruction
                    arguments: Any = [slots[i] for i in inputs]
                    for i in last_use:
                        slots[i] = None
                    made: Any = call(arguments)
                    for i, value in zip(outputs, made, strict=True):
                        if i >= 0:
                            slots[i] = value
                    arguments = made = value = None  # a name here would outlive the slot
                elif isinstance(instruction, WaitRecv):
                    received = transport.receive(instruction.message)
                    if received is None:
                        self.next = index
                        return False
                    for i, value in zip(instruction.slots, received, strict=True):
                        slots[i] = value
                    received = value = None
                elif isinstance(instruction, Send):
                    transport.send(instruction.message, [slots[i] for i in instruction.slots])
                elif isinstance(instruction, Recv):
                    transport.post(instruction.message)
                elif isinstance(instruction, Free):
                    for i in instruction.slots:
                        slots[i] = None
                else:
                    transport.wait_sent(instruction.message)
        except (ConnectionLost, Interrupted):
            self.next = index
            raise
        except Exception as error:
            self.next = index
            raise _blame(self.program, index, error) from error
        self.next = end
        return True


def _blame(program: Program, index: int, error: Exception) -> PipelineError:
    """Say which action of which rank failed, whatever raised."""
    instruction = program.instructions[index]
    if isinstance(instruction, Free):  # which the handler of a signal has interrupted
        text = f"rank {program.rank} failed: {told(error)}"
        return PipelineError(text, rank=program.rank)
    action = instruction.action if isinstance(instruction, Compute) else instruction.message.action
    which = "" if action.microbatch is None else f", microbatch {action.microbatch}"
    return PipelineError(
        f"{action} failed on rank {program.rank} (stage {action.stage}{which}): {told(error)}",
        rank=program.rank,
        stage=action.stage,
        microbatch=action.microbatch,
        action=str(action),
    )
