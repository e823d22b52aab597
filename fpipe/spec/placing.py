"""Where ranks are: the devices and the process group that a caller names."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fpipe import dtensors
from fpipe.errors import StageError, a_type
from fpipe.schedule import Schedule

log = logging.getLogger("fpipe")


def placed(devices: Sequence[torch.device | str | int] | None) -> tuple[torch.device, ...] | None:
    """Devices with their indices, as tensors on them report them.

    Raises:
        StageError: there is no such device.
    """
    if devices is None:
        return None
    if isinstance(devices, str):
        raise StageError(f"devices={devices!r} is one name: give a list with one device per rank")
    if not isinstance(devices, Sequence) or None in devices:
        raise StageError(
            f"devices={devices!r:.60} must be a list or tuple with one device per rank"
        )
    try:
        return tuple(torch.empty(0, device=device).device for device in devices)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise StageError(f"devices={devices!r:.60} cannot be used: {error}") from error


def devices_of_ranks(
    devices: tuple[torch.device, ...] | None, group: dist.ProcessGroup | None
) -> tuple[torch.device, ...] | None:
    """On which device each rank computes; None where it does so wherever its parameters lie."""
    return devices if group is None else (device_of(group),) * group.size()


def group_of(
    group: dist.ProcessGroup | None, mesh: DeviceMesh | None, schedule: Schedule | None
) -> dist.ProcessGroup | None:
    """The process group that `group` or `mesh` names, None for neither.

    Raises:
        StageError: both are given, or the mesh has no dimension ``"pp"``, or one of them is
            something else.
    """
    if mesh is None:
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise StageError(
                f"group={group!r:.60} is no process group of which this process is a member: "
                "dist.group.WORLD is that of all processes; only the ranks in "
                "dist.new_group(ranks) get one from it"
            )
        if group is None and os.environ.get("WORLD_SIZE", "1") != "1" and not dist.is_initialized():
            # dist.group.WORLD is None until then.
            log.warning(
                "a pipeline of the whole model in each of %s processes: for one over all of them "
                "call torch.distributed.init_process_group before it is made, and pass group=",
                os.environ["WORLD_SIZE"],
            )
        if group is None and dist.is_initialized():
            count = dist.get_world_size()
            if 1 < count == getattr(schedule, "num_ranks", None):
                log.warning(
                    "a pipeline of all %d ranks in each of %d processes: for one over all of them "
                    "pass group=dist.group.WORLD, or mesh=",
                    count,
                    count,
                )
        return group
    if not isinstance(mesh, DeviceMesh):
        raise StageError(
            f"mesh={mesh!r:.60} is {a_type(mesh)}: it must be a DeviceMesh, which "
            "init_device_mesh makes"
        )
    if group is not None:
        raise StageError("group and mesh are both given: give one of them")
    if "pp" not in (mesh.mesh_dim_names or ()):
        raise StageError(
            f"mesh has the dimensions {mesh.mesh_dim_names}, none of which is named 'pp': "
            "init_device_mesh(..., mesh_dim_names=('dp', 'pp')) names them"
        )
    ranks = mesh.get_group("pp")
    dtensors.learn(mesh, ranks.group_name)
    return ranks


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where the values that a group moves lie: CUDA if it has NCCL and a device, else the CPU.

    In one process, where there is no group, it is the default device of torch, and the CPU if that
    is the meta device.
    """
    if group is None:
        default = torch.get_default_device()
        return torch.device("cpu") if default.type == "meta" else default
    if "nccl" in carriers(group).values() and torch.cuda.is_available():
        bound: Any = group.bound_device_id  # as init_process_group(device_id=) says
        return bound or torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def carriers(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend that moves tensors of each type of device, such as ``{"cpu": "gloo"}``."""
    return {device.type: group._get_backend(device).name() for device in group._device_types}
