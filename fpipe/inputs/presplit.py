"""Batches that the caller has split, wholly or in part: `fpipe.Microbatches` within them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import optree
from torch import Tensor

from fpipe import pytree
from fpipe.errors import BatchError


class Leaf(NamedTuple):
    """A leaf of a microbatch.

    Attributes:
        path: in the microbatch.
        value: of the caller's `Microbatches`, or that of the batch, which is still to be split.
        dim: that of its rows; None for one that has none.
        ready: whether it came in `Microbatches`.
    """

    path: str
    value: Tensor
    dim: Any
    ready: bool


def microbatches_of(
    leaves: Sequence[Tensor], spec: optree.PyTreeSpec, in_dims: Any, microbatches: int
) -> tuple[tuple[optree.PyTreeSpec, ...], list[list[Leaf]]]:
    """The structure of each microbatch, and its leaves.

    Raises:
        BatchError: there are more or fewer, or they differ in more than shape.
    """
    batch = pytree.unflatten(spec, leaves)
    parts = pytree.number_of_parts(batch)
    if parts != microbatches:
        raise BatchError(
            f"batch has Microbatches of {parts} parts, but the schedule has {microbatches} "
            "microbatches: give one part for each, or use a schedule with as many "
            "(pipe.with_schedule)" + ("; an iterator gives its values once" if parts == 0 else "")
        )
    rest = set(pytree.places_of_rest(spec))
    specs: list[optree.PyTreeSpec] = []
    by_microbatch: list[list[Leaf]] = []
    paths: list[str] = []
    for number, places in enumerate(pytree.places_of_parts(spec, microbatches)):
        tree = pytree.part_of(batch, number)
        if pytree.number_of_parts(tree) is not None:
            raise BatchError(
                f"microbatch {number} has Microbatches within it: they stand for what is split "
                "into the microbatches of a step, which is split once; use a list there"
            )
        specs.append(pytree.structure(tree))
        if specs[number] != specs[0]:
            raise BatchError(
                f"microbatch {number} has the structure {specs[number]}, and microbatch 0 "
                f"{specs[0]}: all parts of Microbatches must have the same"
            )
        paths = paths or pytree.paths(specs[0])
        dims = pytree.broadcast_prefix("in_dims", in_dims, tree, f"microbatch {number}")
        by_microbatch.append(
            [
                Leaf(path, leaves[place], dim, place not in rest)
                for path, place, dim in zip(paths, places, dims, strict=True)
            ]
        )
    _check_kinds(by_microbatch)
    return tuple(specs), by_microbatch


def rows_of(microbatches: Sequence[Sequence[Leaf]]) -> tuple[int, ...] | None:
    """The rows of each microbatch as its ready leaves have them; None where they have none.

    Raises:
        BatchError: leaves of a microbatch have different numbers of rows, or none at all.
    """
    if not any(leaf.ready and leaf.dim is not None for leaf in microbatches[0]):
        return None
    return tuple(_rows(number, leaves) for number, leaves in enumerate(microbatches))


def _rows(number: int, leaves: Sequence[Leaf]) -> int:
    counts = list(_counted(number, leaves))
    for path, rows in counts:
        first, expected = counts[0]
        if rows != expected:
            raise BatchError(
                f"microbatch {number} has {rows} rows in {path or 'it'} and {expected} in "
                f"{first}: its leaves must have the same number of rows; in_dims says which "
                "dimension holds them (None: not split)"
            )
        if not rows:
            raise BatchError(
                f"microbatch {number} has 0 rows in {path or 'it'}: each has one at least"
            )
    return counts[0][1]


def _counted(number: int, leaves: Sequence[Leaf]) -> Iterator[tuple[str, int]]:
    """The path and the rows of each ready leaf that has rows."""
    for path, value, dim, ready in leaves:
        if not ready or dim is None:
            continue
        if not pytree.is_dim(dim, value.dim()):
            raise BatchError(
                f"in_dims is {dim!r} for {path or 'a leaf'} of microbatch {number}, of shape "
                f"{tuple(value.shape)}: it must be the one of its dimensions that holds rows, or "
                "None"
            )
        yield path, value.shape[dim]


def _check_kinds(microbatches: Sequence[Sequence[Leaf]]) -> None:
    """Refuse leaves that differ in dtype, device or number of dimensions."""
    for column in zip(*microbatches, strict=True):
        for number, leaf in enumerate(column):
            kinds = [(v.dtype, v.dim(), v.device) for v in (leaf.value, column[0].value)]
            if kinds[0] != kinds[1]:
                kind, first_kind = (
                    f"{str(dtype).removeprefix('torch.')} with {dims} dimensions on {device}"
                    for dtype, dims, device in kinds
                )
                raise BatchError(
                    f"{leaf.path or 'the leaf'} of microbatch {number} is {kind}, and of "
                    f"microbatch 0 {first_kind}: parts of Microbatches may differ in the sizes of "
                    "their dimensions alone"
                )
