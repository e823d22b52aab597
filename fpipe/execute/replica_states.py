"""Replicas agree on the state that a step leaves, such as running statistics."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.program.interpreter import Run
from fpipe.spec.data import Data


def agree_on_states(data: Data, run: Run) -> None:
    """Put the state of all replicas in place of that of this one.

    Leaves of floating-point numbers become the mean over replicas, or those of the first as `data`
    says; all others become those of the first. Every process of the mesh must call this.

    Args:
        data: which dimensions of the mesh hold replicas.
        run: that has ended, with its states in its slots.
    """
    slots = sorted({slot for _, slot in run.program.results.states})
    values = [run.slots[slot] for slot in slots]
    kinds = dict.fromkeys((value.dtype, value.device) for value in values)
    for dtype, device in kinds:
        alike = [
            at for at, value in enumerate(values) if (value.dtype, value.device) == (dtype, device)
        ]
        flat = torch.cat([values[at].reshape(-1) for at in alike])
        flat = _agreed(data, flat)
        parts = flat.split([values[at].numel() for at in alike])
        for at, piece in zip(alike, parts, strict=True):
            run.slots[slots[at]] = piece.view(values[at].shape).clone()


def _agreed(data: Data, flat: Tensor) -> Tensor:
    """The mean over replicas, or the numbers of the first of them."""
    groups = [data.mesh.get_group(dim) for dim in data.dims]
    if data.state == "mean" and flat.is_floating_point():
        for group in groups:
            dist.all_reduce(flat, group=group)
        return flat / data.replicas
    for group in reversed(groups):
        dist.broadcast(flat, group_src=0, group=group)
    return flat
