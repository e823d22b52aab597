"""How replicas hold the leaves of a stage, and how these are packed into flat collectives.

    leaves of one dtype ── pack ──► one flat tensor ── collective ──► flat ── unpack ──► leaves

A leaf that is divided has its dimension in front and is padded to the same rows on all replicas, as
`torch.chunk` divides it: 7 rows over 2 are 4 and 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fpipe.inputs.signature import Spec
from fpipe.spec.data import Group, Reduce


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
