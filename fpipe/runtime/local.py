"""The in-process transport: all ranks in one thread, driven by one controller."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fpipe.errors import PipelineError
from fpipe.runtime.interpreter import Run
from fpipe.runtime.program import Message


class LocalTransport:
    """Hands values over by reference, or copies them where ranks have devices of their own.

    Copies to a CUDA device run on a stream of that device apart from its computation, ordered by
    events, so that they overlap with it.

    Args:
        devices: the device of each rank, or None where all values stay on the device they are on.
    """

    def __init__(self, devices: Sequence[torch.device] | None = None) -> None:
        self._devices = devices
        self._mail: dict[Message, Sequence[Tensor]] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def post(self, message: Message) -> None:
        """Nothing: the values come with their own memory."""

    def send(self, message: Message, values: Sequence[Tensor]) -> None:
        """Put the values where the other rank finds them."""
        if self._devices is not None:
            values = [self._move(value, self._devices[message.target]) for value in values]
        self._mail[message] = values

    def wait_sent(self, message: Message) -> None:
        """Nothing: the receiver holds references or copies of its own."""

    def receive(self, message: Message) -> Sequence[Tensor] | None:
        """The values, once they have been sent."""
        values = self._mail.pop(message, None)
        if values is not None and self._devices is not None:
            self._await(values, self._devices[message.target])
        return values

    def clear(self) -> None:
        """Forget messages of a step that failed."""
        self._mail.clear()

    def _move(self, value: Tensor, device: torch.device) -> Tensor:
        if value.device == device:
            return value
        if device.type != "cuda" or value.device.type != "cuda":
            return value.to(device)
        stream = self._stream(device)
        stream.wait_stream(torch.cuda.current_stream(value.device))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            moved = value.to(device, non_blocking=True)
        # The sender's allocator must not reuse the memory before the copy has read it.
        value.record_stream(stream)
        return moved

    def _await(self, values: Sequence[Tensor], device: torch.device) -> None:
        if device in self._streams:
            compute = torch.cuda.current_stream(device)
            compute.wait_stream(self._streams[device])
            for value in values:
                value.record_stream(compute)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def run_together(runs: Sequence[Run], transport: LocalTransport) -> None:
    """Drive all ranks to their end in one thread, each as far as its messages let it.

    Raises:
        PipelineError: an action failed.
    """
    try:
        waiting = list(runs)
        while waiting:
            before = [run.next for run in waiting]
            waiting = [run for run in waiting if not run.advance(transport)]
            if [run.next for run in waiting] == before:
                stuck = ", ".join(f"rank {r.program.rank} at instruction {r.next}" for r in waiting)
                raise PipelineError(f"no rank can go on: {stuck}")
    finally:
        transport.clear()
