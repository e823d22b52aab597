"""Parameters and gradients that live on the CPU: what a `CPUOffloadPolicy` says."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpipe.errors import StageError, a_type
from fpipe.host_memory import on_the_cpu


@dataclass(frozen=True)
class Offload:
    """Where parameters and gradients live while nothing computes with them.

    Attributes:
        pins: in page-locked memory.
        devices: of the ranks, on which stages compute.
    """

    pins: bool
    devices: tuple[torch.device, ...]

    @property
    def copies(self) -> bool:
        """Whether any rank computes elsewhere than on the CPU."""
        return any(device.type != "cpu" for device in self.devices)

    def home(self, value: Tensor) -> Tensor:
        """A tensor where it is to live; itself where it lies there."""
        return on_the_cpu(value, pin=self.pins and self.copies)


def read_offload(policy: Any, devices: tuple[torch.device, ...] | None) -> Offload | None:
    """A user's ``offload_policy``.

    Args:
        policy: a ``torch.distributed.fsdp.CPUOffloadPolicy``, an ``OffloadPolicy``, or None.
        devices: of the ranks; None where none are named.

    Raises:
        StageError: it is no policy, or no device is known.
    """
    if policy is None:
        return None
    module = sys.modules.get("torch.distributed.fsdp")  # whoever has a policy has imported it
    if module is None or not isinstance(policy, module.OffloadPolicy):
        raise StageError(
            f"offload_policy={policy!r:.60} is {a_type(policy)}: it must be a CPUOffloadPolicy of "
            "torch.distributed.fsdp, or None"
        )
    if not isinstance(policy, module.CPUOffloadPolicy):
        return None
    if devices is None:
        raise StageError(
            "offload_policy keeps parameters on the CPU, and nothing says where stages compute: "
            'in one process pass devices=, such as ["cuda:0"] * ranks'
        )
    return Offload(bool(policy.pin_memory), devices)
