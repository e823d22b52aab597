"""The interpreter: a short loop over a Program, its slots before, and the boundary beneath it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fpipe.errors import PipelineError, error_text
from fpipe.inputs.keys import Words, keys_of
from fpipe.inputs.params import Parameters
from fpipe.inputs.signature import device_of_keys, is_dense
from fpipe.inputs.split_batch import SplitBatch
from fpipe.program.program import Compute, Free, Message, Program, Recv, Send, WaitRecv


class Transport(Protocol):
    """Moves the values of messages between ranks.

    Messages of one channel, that is from one rank to another, are sent and posted in the order of
    their numbers. Waiting may block; a transport that cannot block because all ranks run in one
    thread returns None instead, and the interpreter lets another rank go on.
    """

    def post(self, message: Message) -> None:
        """Make room for a message that is going to be received."""

    def send(self, message: Message, values: Sequence[Tensor]) -> None:
        """Start to send; `values` stay as they are until `wait_sent`."""

    def wait_sent(self, message: Message) -> None:
        """Return once the values of an earlier `send` may be freed."""

    def receive(self, message: Message) -> Sequence[Tensor] | None:
        """The values of a posted message, or None if they have not arrived."""


class ConnectionLost(Exception):
    """A message could not be moved: the connection to a rank broke, wherever the cause is.

    Attributes:
        peer: the rank at the other end, None for an operation of all ranks.
    """

    def __init__(self, peer: int | None, text: str) -> None:
        super().__init__(text)
        self.peer = peer


class Interrupted(Exception):
    """Another rank failed, so there is no use in computing the rest of the step."""


class Run:
    """One rank on its way through its program.

    Attributes:
        program: what it runs.
        slots: the registers; `load` fills them according to the program's bindings, and its
            results say which to read afterwards.
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
                    results: Any = call(arguments)
                    for i, value in zip(outputs, results, strict=True):
                        if i >= 0:
                            slots[i] = value
                    arguments = results = value = None  # a name here would outlive the slot
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


class Copies:
    """Leaves where they are read, each copied once to a device.

    A copy to the CPU has arrived when it is returned; on CUDA the stream sees to that. Pinned
    memory would still be read when the caller may write there again: it is waited for, once.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.device], Tensor] = {}
        self._pinned: set[torch.device] = set()

    def of(self, value: Tensor, device: torch.device) -> Tensor:
        """The copy of a leaf on a device."""
        key = id(value), device
        if key not in self._made:
            if device.type == "cuda" and value.is_pinned():
                self._pinned.add(device)
            self._made[key] = value.to(device, non_blocking=device.type == "cuda", copy=True)
        return self._made[key]

    def settle(self) -> None:
        """See that the originals may be written to."""
        for device in self._pinned:
            torch.cuda.current_stream(device).synchronize()
        self._pinned.clear()


def load(
    program: Program,
    seeds: Sequence[Tensor],
    params: Parameters,
    parts: SplitBatch | None,
    device: torch.device | None,
    key: Words | None = None,
    copies: Copies | None = None,
    home: torch.device | None = None,
    *,
    brings_params: bool = True,
) -> Run:
    """A run with everything in its slots that is there from the start.

    Args:
        program: of one rank.
        seeds: the cotangent of each microbatch's loss.
        params: with the leaves of the rank's stages.
        parts: the batch; may be None if the program reads nothing of it.
        device: where parameters and batch leaves are copied to, None to leave them.
        key: of the step; may be None if the program reads none.
        copies: of leaves that other runs of the step have made.
        home: where one function was recorded for stages on several devices, else None. A tensor
            that it closes over there is copied too, and all leaves lie as copies do.
        brings_params: copy parameters too; where they live on the CPU, the program does so.
    """
    run = Run(program)
    slots, bindings = run.slots, program.bindings
    if bindings.batch:
        assert parts is not None
    leaves = () if parts is None else parts.leaves
    for stage, leaf, slot in bindings.params:
        slots[slot] = params.stages[stage][leaf]
    for microbatch, leaf, slot in bindings.batch:
        slots[slot] = leaves[microbatch][leaf]
    for constant, slot in bindings.constants:
        slots[slot] = constant
    if device is not None:
        copies = Copies() if copies is None else copies
        _bring(run, device, copies, home, brings_params=brings_params)
    for microbatch, slot in bindings.seeds:
        slots[slot] = seeds[microbatch]
    if params.updating is not None:
        for stage, leaf, slot in bindings.moments:
            slots[slot] = params.updating.moments[params.place(stage, leaf)]
        for (slot,) in bindings.move:
            slots[slot] = params.move
    if bindings.keys:
        assert key is not None
        if device is None:
            device = device_of_keys(leaves[0] if leaves else [])
        places = [(microbatch, number) for microbatch, number, _ in bindings.keys]
        keys = keys_of(key, places, device)
        for (_, _, slot), microbatch_key in zip(bindings.keys, keys, strict=True):
            slots[slot] = microbatch_key
    return run


def _bring(
    run: Run,
    device: torch.device,
    copies: Copies,
    home: torch.device | None,
    *,
    brings_params: bool,
) -> None:
    """Copy to a device what a run reads and what lies elsewhere."""
    slots, bindings = run.slots, run.program.bindings
    for *_, slot in (*(bindings.params if brings_params else ()), *bindings.batch):
        value = slots[slot]
        if value.device != device or (home is not None and not is_dense(value)):
            slots[slot] = copies.of(value, device)
    for constant, slot in bindings.constants:
        if constant.device == home != device:
            slots[slot] = copies.of(constant, device)
    copies.settle()


def _blame(program: Program, index: int, error: Exception) -> PipelineError:
    """Say which action of which rank failed, whatever raised."""
    instruction = program.instructions[index]
    if isinstance(instruction, Free):  # which the handler of a signal has interrupted
        text = f"rank {program.rank} failed: {error_text(error)}"
        return PipelineError(text, rank=program.rank)
    action = instruction.action if isinstance(instruction, Compute) else instruction.message.action
    which = "" if action.microbatch is None else f", microbatch {action.microbatch}"
    return PipelineError(
        f"{action} failed on rank {program.rank} (stage {action.stage}{which}): "
        f"{error_text(error)}",
        rank=program.rank,
        stage=action.stage,
        microbatch=action.microbatch,
        action=str(action),
    )
