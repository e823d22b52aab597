"""The process-group transport: messages as point-to-point operations of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.runtime.buffers import Buffers
from fpipe.runtime.program import Message, Program, Send
from fpipe.runtime.transport import ConnectionLost, Interrupted

# Tags, so that a bell is never taken for a message.
_MESSAGE, _BELL = 0, 1


class GroupTransport:
    """Sends and receives over a process group, one channel per peer and direction.

    On gloo a channel is the order of operations between two ranks in one direction. On NCCL it is a
    communicator of its own, because operations of one communicator wait for each other.

    Args:
        group: the ranks of the pipeline.
        device: where values lie.
        interrupted: whether the step is to be given up; asked before every wait
            for values.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, interrupted: Callable[[], bool]
    ) -> None:
        self._group = group
        self._buffers = Buffers(device)
        self._interrupted = interrupted
        self._channels: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._posted: dict[Message, tuple[list[Any], list[Tensor]]] = {}
        self._sent: dict[Message, tuple[list[Any], Sequence[Tensor]]] = {}

    def open(self, programs: Sequence[Program]) -> None:
        """Make the channels that `programs` use. Every rank calls it with the same programs."""
        if "nccl" not in dist.get_backend(self._group):
            return
        pairs = {
            (i.message.source, i.message.target)
            for program in programs
            for i in program.instructions
            if isinstance(i, Send)
        }
        for pair in sorted(pairs - self._channels.keys()):
            if self._group.rank() in pair:
                ranks = [dist.get_global_rank(self._group, rank) for rank in pair]
                self._channels[pair] = dist.new_group(ranks, use_local_synchronization=True)

    def post(self, message: Message) -> None:
        """Start to receive into a kept buffer."""
        values = [self._buffers.take(spec) for spec in message.specs]
        channel, peer = self._route(message, message.source)
        works = [
            self._guard(message.source, channel.recv, [v], peer, 0) for v in values if v.numel()
        ]
        self._posted[message] = (works, values)

    def receive(self, message: Message) -> Sequence[Tensor]:
        """Wait until the values have arrived."""
        if self._interrupted():
            raise Interrupted
        works, values = self._posted.pop(message)
        self._wait(message.source, works)
        return values

    def send(self, message: Message, values: Sequence[Tensor]) -> None:
        """Start to send; the values are kept until `wait_sent`."""
        channel, peer = self._route(message, message.target)
        works = [
            self._guard(message.target, channel.send, [v], peer, 0) for v in values if v.numel()
        ]
        self._sent[message] = (works, values)

    def send_blank(self, message: Message) -> None:
        """Send values without meaning, so that the receiver of a step that failed can go on."""
        self.send(message, [self._buffers.take(spec) for spec in message.specs])

    def wait_sent(self, message: Message) -> None:
        """Wait until the values have left."""
        works, _ = self._sent.pop(message)
        self._wait(message.target, works)

    def forget(self) -> None:
        """Drop everything under way, when the connections are lost."""
        self._posted.clear()
        self._sent.clear()
        self._buffers.clear()

    def _route(self, message: Message, peer: int) -> tuple[dist.ProcessGroup, int]:
        """The group that carries a message, and the rank of `peer` in it."""
        channel = self._channels.get((message.source, message.target))
        if channel is None:
            return self._group, peer
        return channel, dist.get_group_rank(channel, dist.get_global_rank(self._group, peer))

    def _start(
        self, peer: int, operation: Callable[..., Any], values: Sequence[Tensor], rank: int
    ) -> list[Any]:
        """One operation per value; values without elements do not travel."""
        return [self._guard(peer, operation, [v], rank, _MESSAGE) for v in values if v.numel()]

    def _wait(self, peer: int, works: Sequence[Any]) -> None:
        for work in works:
            self._guard(peer, work.wait)

    def _guard(self, peer: int, operation: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return operation(*arguments)
        except RuntimeError as error:
            raise ConnectionLost(peer, str(error)) from error


def ring(group: dist.ProcessGroup) -> None:
    """Wake every operation of `group` that waits, here and on its peers, by breaking the group.

    gloo closes a connection when a wait on it runs out of time, so on each connection a receive
    that nobody answers is the bell; NCCL has an abort.
    """
    if "nccl" in dist.get_backend(group):
        group.abort()
        return
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _BELL).wait(timedelta(milliseconds=1))
