"""The process-group transport: messages as point-to-point operations of torch.distributed.

Receive buffers are kept from one step to the next.

The first run of a plan on CUDA sends messages by way of the CPU. CUDA loads a kernel when it is
first launched, and waits for the device to do so; libraries reserve memory then, and Inductor times
one kernel beside another. But NCCL receives by a kernel too, which runs until the message is there:
a rank that has posted ahead and waits for its device waits for the other rank, and that one, at the
same, for it. gloo keeps no device busy.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.errors import StageError
from fpipe.inputs.signature import Spec, in_words
from fpipe.program.interpreter import ConnectionLost, Interrupted
from fpipe.program.program import Message, Program, Send
from fpipe.transport.connect import MESSAGE
from fpipe.transport.waiting import Arrival, look_out, make_blank

log = logging.getLogger("fpipe")

OF_NCCL: Final = frozenset(
    {
        torch.bfloat16,
        torch.bool,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.uint8,
    }
)
"""The dtypes that all versions of NCCL send as they are; values of others go as bytes."""

LINGERS: Final = 60.0
"""Seconds that are waited, when a transport is dropped, for its last messages to have left."""

Connect = Callable[[str, Sequence[int]], dist.ProcessGroup]
"""Makes a group of some ranks under a name; every one of them calls it."""


class GroupTransport:
    """Sends and receives over a process group, one channel per peer and direction.

    A channel is a group of its own. On NCCL the operations of one communicator wait for each other.
    On gloo whoever sends locks the connection, and what arrives on it meanwhile keeps the thread
    that listens awake: it tries again and again, on the sender's core at worst, which it then takes
    from the sender that it waits for, for milliseconds (gloo's `Pair::handleEvents`).

    Args:
        rank: of this process in the pipeline.
        device: where values lie.
        connect: makes a group for a channel.
        interrupted: whether the step is to be given up, as far as is known; asked before and after
            every wait for values.
        failed: asks whether any rank has failed.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        connect: Connect,
        interrupted: Callable[[], bool],
        failed: Callable[[], bool],
    ) -> None:
        self._rank = rank
        self._device = device
        self._buffers = Buffers(device)
        self._connect = connect
        self._interrupted = interrupted
        self._failed = failed
        self._channels: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._posted: dict[Message, tuple[list[Any], list[Tensor], Arrival | None]] = {}
        self._sent: dict[Message, tuple[list[Any], Sequence[Tensor]]] = {}
        # The end of the last step on the device. Channels are aborted when they are dropped, such
        # as when the process ends, and the device may not yet have come to what they are to send.
        self._ends: list[torch.cuda.Event] = []
        if device.type == "cuda":
            weakref.finalize(self, _outlast, self._ends)

    def open(self, programs: Sequence[Program]) -> None:
        """Make the channels that `programs` use. Every rank calls it with the same programs."""
        pairs = {(message.source, message.target) for message in messages_of(programs)}
        # Both ends wait for each other: one order for all ranks keeps them from a circle.
        for pair in sorted(pairs - self._channels.keys()):
            if self._rank in pair:
                name = f"channel/{pair[0]}-{pair[1]}"
                self._channels[pair] = self._connect(name, pair)
                if self._device.type == "cuda":
                    self._send_first(pair)

    def _send_first(self, pair: tuple[int, int]) -> None:
        """Send one number, as nothing else is under way.

        NCCL connects two ranks when they come to the first message between them, and holds the host
        of the one that comes first until the other is there too, at the same message: ranks that
        post ahead would wait for each other for ever.
        """
        channel, number = self._channels[pair], torch.zeros(1, device=self._device)
        other = 1 - pair.index(self._rank)
        operation = channel.send if other else channel.recv
        self._wait(pair[other], self._start(pair[other], operation, [number], other))
        torch.cuda.current_stream(self._device).synchronize()

    def begin(self) -> None:
        """A step begins: on whatever stream, buffers are written to once the last has read them."""
        for end in self._ends:
            torch.cuda.current_stream(self._device).wait_event(end)

    def post(self, message: Message) -> None:
        """Start to receive into a kept buffer."""
        values = [self._buffers.take(spec) for spec in message.specs]
        travelling = _travelling(values)
        seen = travelling and self._device.type == "cpu"
        arrival = Arrival(travelling[-1]) if seen else None
        channel, peer = self._route(message, message.source)
        works = self._start(message.source, channel.recv, travelling, peer)
        self._posted[message] = (works, values, arrival)

    def receive(self, message: Message) -> Sequence[Tensor]:
        """Wait until the values have arrived, unless the step is to be given up."""
        if self._interrupted():
            raise Interrupted
        _, values, arrival = self._posted[message]
        self._await(message)
        # Who sends blanks has told before that it failed. Values may look like blanks.
        blank = arrival is not None and arrival.is_blank
        self._posted[message] = ([], values, None)  # for the drain to take, if it comes to that
        if self._interrupted() or (blank and self._failed()):
            raise Interrupted
        delivered = self._delivered(values)
        del self._posted[message]
        return delivered

    def _delivered(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """Values that have arrived, where they are read."""
        return values

    def take(self, message: Message) -> None:
        """Wait until the values have arrived, whatever has become of the step, for nobody."""
        self._await(message)
        del self._posted[message]

    def _await(self, message: Message) -> None:
        works, _, arrival = self._posted[message]
        if arrival is not None:
            look_out(arrival)
        self._wait(message.source, works)

    def send(self, message: Message, values: Sequence[Tensor]) -> None:
        """Start to send; the values are kept until `wait_sent`."""
        self._dispatch(message, values)

    def _dispatch(self, message: Message, values: Sequence[Tensor]) -> None:
        channel, peer = self._route(message, message.target)
        # All are contiguous but gradients of parameters, which may be transposed as those are read.
        values = self._leaving([value.contiguous() for value in values])
        works = self._start(message.target, channel.send, _travelling(values), peer)
        self._sent[message] = (works, values)

    def _leaving(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """Values to be sent, where they are sent from."""
        return values

    def send_blank(self, message: Message) -> None:
        """Send values without meaning, so that the receiver of a step that failed can go on."""
        values = [self._buffers.take(spec) for spec in message.specs]
        make_blank(_travelling(values))
        self._dispatch(message, values)

    def wait_sent(self, message: Message) -> None:
        """Wait until the values have left."""
        works, _ = self._sent.pop(message)
        self._wait(message.target, works)

    def end(self) -> None:
        """A step has come to its end: keep no more than it took."""
        self._buffers.settle()
        if self._device.type == "cuda":
            self._ends[:] = [torch.cuda.current_stream(self._device).record_event()]

    def forget(self) -> None:
        """Drop everything under way, when the connections are lost."""
        self._posted.clear()
        self._sent.clear()
        self._buffers.clear()
        self._ends.clear()

    def _route(self, message: Message, peer: int) -> tuple[dist.ProcessGroup, int]:
        """The group that carries a message, and the rank of `peer` in it."""
        ends = (message.source, message.target)
        return self._channels[ends], ends.index(peer)

    def _start(
        self, peer: int, operation: Callable[..., Any], values: Sequence[Tensor], rank: int
    ) -> list[Any]:
        """One operation per value."""
        if self._device.type == "cuda":
            values = [v if v.dtype in OF_NCCL else v.view(-1).view(torch.uint8) for v in values]
        return [self._guard(peer, operation, [value], rank, MESSAGE) for value in values]

    def _wait(self, peer: int, works: Sequence[Any]) -> None:
        for work in works:
            self._guard(peer, work.wait)

    def _guard(self, peer: int, operation: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return operation(*arguments)
        except RuntimeError as error:
            raise ConnectionLost(peer, str(error)) from error


def messages_of(programs: Sequence[Program]) -> list[Message]:
    """All that is sent."""
    steps = (step for program in programs for step in program.instructions)
    return [step.message for step in steps if isinstance(step, Send)]


def _outlast(ends: Sequence[torch.cuda.Event]) -> None:
    """Wait for the end of a step on the device, but not for ever for a rank that has died since."""
    give_up = time.monotonic() + LINGERS
    with suppress(RuntimeError):  # an error of a kernel, which is not news here
        while not all(end.query() for end in ends):
            if time.monotonic() > give_up:
                log.warning("the device has not come to the end of the last step; it is given up")
                return
            time.sleep(0.001)


def _travelling(values: Sequence[Tensor]) -> list[Tensor]:
    """Values without elements do not travel."""
    return [value for value in values if value.numel()]


class Buffers:
    """Lends tensors of given shapes, and takes one back when nothing else refers to its memory.

    Nobody says when a value that was received is no longer used: it may live on as the view that a
    stage returned, or in the autograd graph of the caller, whose references Python does not count.
    So the pool lends an alias, a new tensor on memory that the pool owns, and counts the references
    to that memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[Spec, list[Tensor]] = defaultdict(list)
        self._lent: set[Spec] = set()
        self._alone = _references(torch.empty(1, device=device))

    def take(self, spec: Spec) -> Tensor:
        """A contiguous tensor with arbitrary contents."""
        self._lent.add(spec)
        kept = self._kept[spec]
        for index, buffer in enumerate(kept):
            if _references(buffer) == self._alone:
                # The least recently lent is tried first: it is the likeliest to be free.
                kept.append(kept.pop(index))
                return buffer.detach()
        with torch.inference_mode(False):  # it outlives the step, and its mode
            kept.append(torch.empty(spec.shape, dtype=spec.dtype, device=self._device))
        return kept[-1].detach()

    def settle(self) -> None:
        """At the end of a step, give up those of other shapes than were lent in it.

        Where lengths change from batch to batch there is no end of shapes.
        """
        for spec in self._kept.keys() - self._lent:
            del self._kept[spec]
        self._lent.clear()

    def clear(self) -> None:
        """Give all buffers up, such as those that a broken connection may still write to."""
        self._kept.clear()
        self._lent.clear()


def _references(tensor: Tensor) -> tuple[int, int]:
    """How many tensors refer to the memory of `tensor`, and how many names to it as a storage."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


HINDRANCES: Final = ("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS")
"""Environment variables of CUDA: launch by launch, if it is not 0; from one queue, if it is 1."""


def hindrances() -> dict[str, bool]:
    """Which of them are set, so that what follows a message of NCCL waits until that has ended."""
    blocking, connections = (os.environ.get(name, "") for name in HINDRANCES)
    return dict(zip(HINDRANCES, (blocking not in ("", "0"), connections == "1"), strict=True))


class StagedTransport(GroupTransport):
    """Sends from a device and receives to it over groups of the CPU.

    Args:
        rank: and `others` as for a `GroupTransport`.
        device: where values are computed.
    """

    def __init__(self, rank: int, device: torch.device, *others: Any) -> None:
        super().__init__(rank, torch.device("cpu"), *others)
        self._home = device

    def open(self, programs: Sequence[Program]) -> None:
        """Make the channels, and load what makes blanks where they are made later."""
        super().open(programs)
        dtypes = {spec.dtype for message in messages_of(programs) for spec in message.specs}
        make_blank([torch.empty(1, dtype=dtype, device=self._home) for dtype in dtypes])

    def _delivered(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        return [value.to(self._home) for value in values]

    def send(self, message: Message, values: Sequence[Tensor]) -> None:
        """Start to send.

        Raises:
            StageError: a value lies elsewhere, and NCCL would not move it in later steps.
        """
        for value in values:
            if value.device != self._home:
                raise StageError(
                    f"a value that goes to another rank, {in_words(value)}, lies on {value.device} "
                    f"while the rank computes on {self._home}: make it there, such as with "
                    "device=x.device"
                )
        super().send(message, values)

    def _leaving(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        return [value.cpu() for value in values]  # which waits until they are computed

    def end(self) -> None:
        """A step has come to its end; there may be no other of this kind, so keep no buffers."""
        self.forget()
