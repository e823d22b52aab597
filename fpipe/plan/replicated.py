"""The signature of local shards, and that of the whole parameters that stages see.

signature of local tensors ──► how each leaf is divided ──► signature that stages are traced on
"""

from __future__ import annotations

from torch._prims_common import make_contiguous_strides_for

from fpipe import pytree
from fpipe.dtensors import Placed, placements_of, without_dims
from fpipe.errors import BatchError
from fpipe.inputs.signature import LeafShape, Signature, TreeShape
from fpipe.program.replica_layout import Division, Replicas
from fpipe.spec.data import Data


def replicas_of(signature: Signature, data: Data) -> Replicas:
    """How replicas share parameters and add up gradients.

    Raises:
        BatchError: a leaf lies over a dimension of `data` in a way that cannot be gathered.
    """
    divided: dict[tuple[int, int], Division] = {}
    for stage, shape in enumerate(signature.params):
        for leaf, place in enumerate(placements_of(shape.spec)):
            if place is None:
                continue
            fault = _fault(place, data)
            if fault is not None:
                path = pytree.paths(shape.spec)[leaf]
                raise BatchError(
                    f"params{path} of stage {stage} is a DTensor placed {place.placements} over "
                    f"{place.dims[0]}, {fault}: pipe.shard(params) places parameters over replicas"
                )
            dim = _divided_along(place, data)
            if dim is not None:
                local = shape.leaves[leaf]
                dtype = data.gathered_dtype(local.dtype)
                divided[stage, leaf] = Division(dim, place.shape[dim], local.shape, dtype)
    present = sum(size > 0 for size in signature.rows)
    return Replicas(
        divided, data.groups, data.bucket_bytes, data.mesh.device_type, present, data.reduce
    )


def gathered(signature: Signature, data: Data) -> Signature:
    """The signature of the same parameters when replicas have gathered them."""
    known: dict[TreeShape, TreeShape] = {}
    for shape in signature.params:
        if shape not in known:
            known[shape] = _gathered_tree(shape, data)
    return signature._replace(params=tuple(known[shape] for shape in signature.params))


def _gathered_tree(shape: TreeShape, data: Data) -> TreeShape:
    places = placements_of(shape.spec)
    leaves = tuple(
        _gathered_leaf(leaf, place, data) for leaf, place in zip(shape.leaves, places, strict=True)
    )
    spec = without_dims(shape.spec, [leaf.shape for leaf in leaves], data.dims)
    return TreeShape(spec, leaves, shape.orders)


def _gathered_leaf(leaf: LeafShape, place: Placed | None, data: Data) -> LeafShape:
    dim = None if place is None else _divided_along(place, data)
    if place is None or dim is None:
        return leaf
    sizes = list(leaf.shape)
    sizes[dim] = place.shape[dim]
    strides = make_contiguous_strides_for(sizes)
    dtype = data.gathered_dtype(leaf.dtype)
    return leaf._replace(shape=tuple(sizes), stride=strides, dtype=dtype)


def _divided_along(place: Placed, data: Data) -> int | None:
    """The dimension of a leaf along which replicas hold parts, None where each has all of it."""
    from torch.distributed.tensor import Shard

    placement = place.over(data.sharding)
    return placement.dim if isinstance(placement, Shard) else None


def _fault(place: Placed, data: Data) -> str | None:
    """Why a leaf cannot be gathered; None if it can."""
    for name in data.dims:
        placement = place.over(name)
        if placement is None or placement.is_replicate():
            continue
        if not placement.is_shard():
            return f"and {placement} over {name!r} is no shard that can be gathered"
        if name != data.sharding:
            return f"and of data={data.dims} the last dimension alone divides parameters"
        for other, theirs in zip(place.dims[0] or (), place.placements, strict=True):
            dim = _divided_along(place, data)
            if other != name and dim is not None and theirs.is_shard(dim):
                return (
                    f"which divides dimension {dim} over {other!r} too: divide another "
                    "dimension of it over replicas, or none (Replicate())"
                )
    return None
