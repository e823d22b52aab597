"""All-gathers: tensors of one shape, and picklable values."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.errors import PipelineError
from fpipe.program.interpreter import ConnectionLost
from fpipe.transport.waiting import look_now_and_then, look_out

T = TypeVar("T")


def connected(operation: Callable[[], T]) -> T:
    """Run an operation of all ranks; its failure is a lost connection."""
    try:
        return operation()
    except PipelineError:
        raise
    except RuntimeError as error:
        raise ConnectionLost(None, str(error)) from error


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """One picklable value of each rank."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [int(size) for size in gather(torch.tensor(len(data), device="cpu"), group)]
    padded = torch.nn.functional.pad(data, (0, max(sizes) - len(data)))
    return [
        pickle.loads(bytes(row[:size].tolist()))
        for row, size in zip(gather(padded, group), sizes, strict=True)
    ]


def gather(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks, all of one shape, along a new first dimension.

    Raises:
        ConnectionLost: a rank is gone.
    """
    return start_gather(value, group)()


def start_gather(
    value: Tensor, group: dist.ProcessGroup, tell: Callable[[float], None] | None = None
) -> Callable[[], Tensor]:
    """Begin to gather; what comes back waits for the tensors of all ranks.

    Where that takes long, it calls `tell` with the seconds so far.
    """
    # Gloo gathers and reduces around a ring, one rank after the other. This is one message to each,
    # and takes a fourth of the time on four ranks whose cores are asleep.
    copies = value.expand(group.size(), *value.shape).contiguous()
    everyone = torch.empty_like(copies)
    work = connected(lambda: group.alltoall_base(everyone, copies, [], []))

    def wait() -> Tensor:
        look_out(work.is_completed)
        look_now_and_then(work.is_completed, tell)
        work.wait()
        return everyone

    return lambda: connected(wait)
