"""The in-process transport: all ranks in one thread, driven by one controller."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fpipe.errors import PipelineError
from fpipe.inputs.ambient import current
from fpipe.program.interpreter import Run
from fpipe.program.program import Message


class Lane(NamedTuple):
    """Where copies from one CUDA device to another run.

    A copy between devices takes the current streams of both, so both are apart from computation.

    Attributes:
        leaving: the stream of the device they come from.
        arriving: that of the device they go to.
    """

    leaving: torch.cuda.Stream
    arriving: torch.cuda.Stream


Lanes: TypeAlias = dict[tuple[torch.device, torch.device], Lane]


class LocalTransport:
    """Hands values over by reference, or copies them where ranks have devices of their own.

    It serves one step, so that others may run at the same time, in other threads.

    Copies between CUDA devices have a lane for each direction, ordered by events, so that they
    overlap with the computation of either device.

    Args:
        devices: the device of each rank, or None where all values stay on the device they are on.
        lanes: which steps before have used, to which those are added that are missing.

    Attributes:
        devices: as given.
    """

    def __init__(self, devices: Sequence[torch.device] | None, lanes: Lanes) -> None:
        self.devices = devices
        self._lanes = lanes
        self._mail: dict[Message, tuple[Sequence[Tensor], torch.cuda.Event | None]] = {}

    def at(self, rank: int) -> AbstractContextManager[Any]:
        """Within it the current device is that of a rank, as code of a stage expects it."""
        return current(None if self.devices is None else self.devices[rank])

    def post(self, message: Message) -> None:
        """Nothing: the values come with their own memory."""

    def send(self, message: Message, values: Sequence[Tensor]) -> None:
        """Put the values where the other rank finds them."""
        arrived = None
        if self.devices is not None:
            source, target = self.devices[message.source], self.devices[message.target]
            lane = self._lane(source, target)
            if lane is None:
                values = [value.to(target) for value in values]
            else:
                values, arrived = _copied(values, lane)
        self._mail[message] = values, arrived

    def wait_sent(self, message: Message) -> None:
        """Nothing: the receiver holds references or copies of its own."""

    def receive(self, message: Message) -> Sequence[Tensor] | None:
        """The values, once they have been sent."""
        values, arrived = self._mail.pop(message, (None, None))
        if values is not None and arrived is not None and self.devices is not None:
            _await(values, arrived, self.devices[message.target])
        return values

    def _lane(self, source: torch.device, target: torch.device) -> Lane | None:
        """None where nothing is copied, or the copy is waited for, as from and to the CPU."""
        if source == target or {source.type, target.type} != {"cuda"}:
            return None
        lane = self._lanes.get((source, target))
        if lane is None:
            new = Lane(torch.cuda.Stream(source), torch.cuda.Stream(target))
            lane = self._lanes.setdefault((source, target), new)
        return lane


def _copied(values: Sequence[Tensor], lane: Lane) -> tuple[list[Tensor], torch.cuda.Event]:
    """The values on the device that a lane leads to, and the event after which they are there."""
    lane.leaving.wait_stream(torch.cuda.current_stream(lane.leaving.device))
    with torch.cuda.stream(lane.leaving), torch.cuda.stream(lane.arriving):
        moved = [value.to(lane.arriving.device, non_blocking=True) for value in values]
    for value in values:
        if value.is_cuda:  # a stage may return what lies on the CPU
            # The sender's allocator must not reuse the memory before the copy has read it.
            value.record_stream(lane.leaving)
    return moved, lane.arriving.record_event()


def _await(values: Sequence[Tensor], arrived: torch.cuda.Event, device: torch.device) -> None:
    """Let the computation that follows on a device begin when these values are there.

    Copies of later messages may be under way behind them, which are not waited for.
    """
    compute = torch.cuda.current_stream(device)
    compute.wait_event(arrived)
    for value in values:
        # They lie in memory of the lane's, which must not be reused before they have been read.
        value.record_stream(compute)


def _advance_at(run: Run, transport: LocalTransport) -> bool:
    with transport.at(run.program.rank):
        return run.advance(transport)


def run_together(runs: Sequence[Run], transport: LocalTransport) -> None:
    """Drive all ranks to their end in one thread, each as far as its messages let it.

    Raises:
        PipelineError: an action failed.
    """
    advance = Run.advance if transport.devices is None else _advance_at
    waiting = list(runs)
    while waiting:
        before = [run.next for run in waiting]
        waiting = [run for run in waiting if not advance(run, transport)]
        if [run.next for run in waiting] == before:
            stuck = ", ".join(f"rank {r.program.rank} at instruction {r.next}" for r in waiting)
            raise PipelineError(f"no rank can go on: {stuck}")
