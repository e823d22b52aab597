"""Parameters of replicas: divided over them, or the same on all of them.

params of the first replica ── broadcast ──► every replica ── shard ──► DTensors over "dp"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

from fpipe import dtensors, pytree
from fpipe.errors import BatchError, StageError
from fpipe.inputs.host_memory import Keep
from fpipe.spec.data import Data

if TYPE_CHECKING:
    pass


def replicated(params: Any, data: Data | None, keep: Keep = None) -> Any:
    """The result of `Pipeline.replicate`, and its errors, with leaves where `keep` puts them."""
    data = _checked(data, "replicate")
    return pytree.map_wholes(lambda leaf, path: _kept(_as_first(leaf, path, data), keep), params)


def divided(params: Any, data: Data | None, keep: Keep = None) -> Any:
    """The result of `Pipeline.shard`, and its errors, with leaves where `keep` puts them."""
    data = _checked(data, "shard")

    def divide(leaf: Any, path: str) -> Any:
        return _kept(_part(_as_first(leaf, path, data), data), keep)

    return pytree.map_wholes(divide, params)


def _checked(data: Data | None, method: str) -> Data:
    if data is None:
        raise StageError(
            f"pipe.{method} is for a pipeline over replicas: make it with data=, the dimension of "
            'the mesh that holds them, as in fpipe.pipeline(..., mesh=mesh, data="dp")'
        )
    return data


def _kept(leaf: Any, keep: Keep) -> Any:
    """A leaf where it is to live."""
    if keep is None or leaf.is_meta:
        return leaf
    place, local = dtensors.place_of(leaf), keep(dtensors.local(leaf))
    return local if place is None else place.made_of(local)


def _as_first(leaf: Any, path: str, data: Data) -> Any:
    """A leaf with the numbers that it has on the first replica."""
    if not isinstance(leaf, Tensor):
        raise BatchError(f"params{path}={leaf!r:.60} is no tensor: a parameter must be one")
    place = dtensors.place_of(leaf)
    over = [name for name in data.dims if place is not None and place.over(name) is not None]
    if over:
        raise BatchError(
            f"params{path} is a DTensor over {over} already: pass whole parameters, "
            ".full_tensor(), or use it as it is"
        )
    local = dtensors.local(leaf)
    if local.is_meta:
        return leaf
    with torch.no_grad():
        first = local.detach().clone(memory_format=torch.preserve_format)
        # A tensor on the CPU goes by way of the device whose messages the mesh carries.
        sent = first.contiguous().to(data.mesh.device_type)
        for dim in reversed(data.dims):
            dist.broadcast(sent, group_src=0, group=data.mesh.get_group(dim))
        if sent is not first:
            first.copy_(sent)
    return first if place is None else place.made_of(first)


def _part(leaf: Any, data: Data) -> Any:
    """This replica's part of a leaf, as a DTensor over the replicas' dimensions as well."""
    from torch.distributed.tensor import Replicate, Shard

    place = dtensors.place_of(leaf)
    local = dtensors.local(leaf)
    known = {} if place is None else dict(zip(place.dims[0] or (), place.placements, strict=True))
    free = (d for d in range(local.dim()) if not any(p.is_shard(d) for p in known.values()))
    dim = next(free, None)  # which no other dimension of the mesh divides
    size = data.mesh[data.sharding].size()
    rank = data.mesh.get_local_rank(data.sharding)
    for name in data.dims:
        known[name] = Replicate()
    if dim is not None:
        known[data.sharding] = Shard(dim)
        rows = local.shape[dim]
        each = -(-rows // size)
        start = min(rank * each, rows)
        shard = local.narrow(dim, start, min(each, rows - start))
        # A part that lies in the memory of the whole would keep all of it.
        local = shard.clone(memory_format=torch.contiguous_format)
    names = [name for name in data.mesh.mesh_dim_names or () if name in known]
    stride = leaf.stride() if place is not None else make_contiguous_strides_for(leaf.shape)
    mesh, placements = data.mesh[tuple(names)], [known[name] for name in names]
    return dtensors.assembled(local, mesh, placements, leaf.shape, stride)
