"""Connections between ranks: what carries a group's tensors, and groups of fpipe's own.

`torch.distributed.new_group` names a group by how many the process has made before, so ranks with
different histories wait for each other under different names (pytorch #173608). Groups made here
are named by their purpose, are known to their members alone, and are forgotten with the pipeline.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

# Tags, so that a bell is never taken for a message.
MESSAGE, BELL = 0, 1


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where the values that a group moves lie: CUDA if it has NCCL and a device, else the CPU."""
    if "nccl" in carriers(group).values() and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def carriers(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend that moves tensors of each type of device, such as ``{"cpu": "gloo"}``."""
    return {device.type: group._get_backend(device).name() for device in group._device_types}


def connect(
    backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """A group that nobody else knows of. It returns when all `size` ranks have called it.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        store: with a prefix that is this group's alone.
        rank: of this process in the group.
        size: number of ranks.
        timeout: of its operations.
    """
    group = dist.ProcessGroup(store, rank, size)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        carrier = dist.ProcessGroupNCCL(store, rank, size, options)
        kind, device = dist.ProcessGroup.BackendType.NCCL, torch.device("cuda")
        group._set_default_backend(kind)
        group._register_backend(device, kind, carrier)
        # A communicator is made by its first operation, in which all of its ranks wait.
        group.allreduce([torch.zeros(1, device=device)]).wait()
    else:
        kind, device = dist.ProcessGroup.BackendType.GLOO, torch.device("cpu")
        group._set_default_backend(kind)
        group._register_backend(device, kind, dist.ProcessGroupGloo(store, rank, size, timeout))
    return group


def ring(group: dist.ProcessGroup) -> None:
    """Wake every operation of `group` that waits, here and on its peers, by breaking the group.

    gloo closes a connection when a wait on it runs out of time, so on each connection a receive
    that nobody answers is the bell; NCCL has an abort.
    """
    kinds = carriers(group)
    if kinds.get("cuda") == "nccl":
        group._get_backend(torch.device("cuda")).abort()
    if kinds.get("cpu") != "gloo":
        return
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, BELL).wait(timedelta(milliseconds=1))
