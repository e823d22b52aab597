"""Messages between devices by way of the CPU, for the first run of a plan.

CUDA loads a kernel when it is first launched, and waits for the device to do so; libraries reserve
memory then, and Inductor times one kernel beside another. But NCCL receives by a kernel too, which
runs until the message is there: a rank that has posted ahead and waits for its device waits for the
other rank, and that one, at the same, for it. gloo keeps no device busy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fpipe.runtime.group import Connect, GroupTransport
from fpipe.runtime.program import Message, Program, Send
from fpipe.runtime.waiting import make_blank


class StagedTransport(GroupTransport):
    """Sends from a device and receives to it over groups of the CPU.

    Args:
        rank: as for a `GroupTransport`, and so are `connect`, `interrupted` and `failed`.
        device: where values are computed.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        connect: Connect,
        interrupted: Callable[[], bool],
        failed: Callable[[], bool],
    ) -> None:
        super().__init__(rank, torch.device("cpu"), connect, interrupted, failed)
        self._home = device

    def open(self, programs: Sequence[Program]) -> None:
        """Make the channels, and load what makes blanks where they are made later."""
        super().open(programs)
        specs = {
            spec.dtype
            for program in programs
            for i in program.instructions
            if isinstance(i, Send)
            for spec in i.message.specs
        }
        make_blank([torch.empty(1, dtype=dtype, device=self._home) for dtype in specs])

    def _delivered(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """On the device."""
        return [value.to(self._home) for value in values]

    def send(self, message: Message, values: Sequence[Tensor]) -> None:
        """Wait until the values are computed, and start to send them."""
        # Made contiguous on the device, as in later runs, whose kernel is loaded here.
        super().send(message, [value.contiguous().cpu() for value in values])

    def end(self) -> None:
        """A step has come to its end; there may be no other of this kind, so keep no buffers."""
        self.forget()
