"""How replicas hold the leaves of a stage, and how these are packed into flat collectives.

    leaves of one dtype ── pack ──► one flat tensor ── collective ──► flat ── unpack ──► leaves
    signature of parts ──► how each leaf is divided ──► signature that stages are traced on

A leaf that is divided has its dimension in front and is padded to the same rows on all replicas, as
`torch.chunk` divides it: 7 rows over 2 are 4 and 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

from fpipe import pytree
from fpipe.dtensors import Placed, placements_of, without_dims
from fpipe.errors import BatchError
from fpipe.inputs.signature import LeafShape, Signature, Spec, TreeShape
from fpipe.spec.data import Data, Group, Reduce


class Division(NamedTuple):
    """How replicas hold parts of a leaf.

    Attributes:
        dim: the dimension that is divided.
        rows: its size in the whole leaf.
        local: the shape of this replica's part.
        dtype: in which it is gathered.
    """

    dim: int
    rows: int
    local: tuple[int, ...]
    dtype: torch.dtype

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the whole leaf."""
        shape = list(self.local)
        shape[self.dim] = self.rows
        return tuple(shape)

    def padded(self, parts: int) -> tuple[int, ...]:
        """The shape of a part with its dimension in front, padded to that of the greatest part."""
        rest = [size for at, size in enumerate(self.local) if at != self.dim]
        return -(-self.rows // parts), *rest


class Replicas(NamedTuple):
    """How replicas share parameters and add up gradients.

    Attributes:
        divided: the leaves that are divided, by stage and leaf; every replica has all others.
        groups: over which gradients are added up; leaves are divided over the last one.
        bucket_bytes: as for `fpipe.spec.data.Data`.
        device: the type of the devices on which collectives run.
        present: how many microbatches this replica has, the first ones: it may have fewer rows than
            the schedule has microbatches.
        reduce: adds up flat tensors in place of torch, if there is one.
    """

    divided: Mapping[tuple[int, int], Division]
    groups: tuple[Group, ...]
    bucket_bytes: int | None
    device: str
    present: int
    reduce: Reduce | None = None

    @property
    def sharding(self) -> Group:
        """The group over which leaves are divided."""
        return self.groups[-1]

    def packed(self, stage: int, leaves: Sequence[int], dtype: torch.dtype) -> Packed:
        """How some leaves of a stage, which are divided, lie in one flat tensor."""
        divisions = tuple(self.divided[stage, leaf] for leaf in leaves)
        return Packed(divisions, dtype, self.sharding.size)

    def local(self, stage: int, leaf: int, spec: Spec) -> Spec:
        """This replica's part of a gradient with the shape of the whole leaf."""
        division = self.divided.get((stage, leaf))
        return spec if division is None else Spec(division.local, spec.dtype)


class Packed(NamedTuple):
    """Divided leaves of one dtype in one flat tensor per replica.

    Attributes:
        divisions: of the leaves, in order.
        dtype: of the flat tensor.
        parts: the number of replicas that hold parts.
    """

    divisions: tuple[Division, ...]
    dtype: torch.dtype
    parts: int

    @property
    def sizes(self) -> list[int]:
        """Elements of each leaf in the flat tensor of one replica."""
        return [prod(division.padded(self.parts)) for division in self.divisions]

    def pack_parts(self, leaves: Sequence[Tensor]) -> Tensor:
        """The parts of this replica, flat."""
        flat = leaves[0].new_zeros(sum(self.sizes), dtype=self.dtype)
        for division, place, leaf in zip(
            self.divisions, flat.split(self.sizes), leaves, strict=True
        ):
            place.view(division.padded(self.parts))[: leaf.shape[division.dim]] = leaf.movedim(
                division.dim, 0
            )
        return flat

    def pack_wholes(self, leaves: list[Tensor]) -> Tensor:
        """All parts of whole leaves, one replica's after the other's; lets the leaves go."""
        flat = leaves[0].new_zeros(self.parts, sum(self.sizes))
        for division, place in zip(self.divisions, flat.split(self.sizes, 1), strict=True):
            leaf = leaves.pop(0).movedim(division.dim, 0)
            rows, *rest = division.padded(self.parts)
            for replica in range(self.parts):
                rows_here = leaf[replica * rows : (replica + 1) * rows]
                place[replica].view(rows, *rest)[: len(rows_here)] = rows_here
            del leaf
        return flat.view(-1)

    def unpack_parts(self, flat: Tensor) -> list[Tensor]:
        """The parts of this replica in a flat tensor, in memory of their own."""
        shards = []
        for division, place in zip(self.divisions, flat.split(self.sizes), strict=True):
            shard = place.view(division.padded(self.parts))[: division.local[division.dim]]
            shards.append(
                shard.movedim(0, division.dim).clone(memory_format=torch.contiguous_format)
            )
        return shards

    def unpack_wholes(self, flat: Tensor) -> list[Tensor]:
        """The whole leaves of which a flat tensor has all parts, in memory of their own."""
        leaves = []
        for division, place in zip(
            self.divisions, flat.view(self.parts, -1).split(self.sizes, 1), strict=True
        ):
            rows, *rest = division.padded(self.parts)
            whole = place.reshape(self.parts * rows, *rest)[: division.rows].movedim(
                0, division.dim
            )
            alone = whole.is_contiguous() and whole.untyped_storage()._cdata != (
                flat.untyped_storage()._cdata
            )
            leaves.append(whole if alone else whole.clone(memory_format=torch.contiguous_format))
        return leaves


def flattened(values: list[Tensor]) -> Tensor:
    """All elements of some tensors in one."""
    return torch.cat([value.reshape(-1) for value in values])


def taken_apart(shapes: Sequence[Sequence[int]], flat: Tensor) -> list[Tensor]:
    """The inverse of `flattened`, in memory of its own for each tensor."""
    sizes = [prod(shape) for shape in shapes]
    return [
        piece.view(tuple(shape)).clone()
        for piece, shape in zip(flat.split(sizes), shapes, strict=True)
    ]


# ── signatures of parts ─────────────────────────────────────────────────────────────────────────


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


def buckets(nbytes: Sequence[int], most: int | None) -> list[list[int]]:
    """Divide leaves into runs of at most so many bytes; one leaf may have more.

    Example:
        >>> buckets([4, 4, 9, 1], 8), buckets([4, 4, 9, 1], None)
        ([[0, 1], [2], [3]], [[0, 1, 2, 3]])
    """
    runs: list[list[int]] = []
    room = 0.0
    for index, size in enumerate(nbytes):
        if not runs or size > room:
            runs.append([])
            room = float("inf") if most is None else most
        runs[-1].append(index)
        room -= size
    return runs
