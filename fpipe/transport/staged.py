"""Messages between devices by way of the CPU, for the first run of a plan.

CUDA loads a kernel when it is first launched, and waits for the device to do so; libraries reserve
memory then, and Inductor times one kernel beside another. But NCCL receives by a kernel too, which
runs until the message is there: a rank that has posted ahead and waits for its device waits for the
other rank, and that one, at the same, for it. gloo keeps no device busy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fpipe.errors import StageError
from fpipe.inputs.signature import in_words
from fpipe.program.program import Message, Program
from fpipe.transport.group import GroupTransport, messages_of
from fpipe.transport.waiting import make_blank

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
