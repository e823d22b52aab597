"""Split a batch pytree into microbatches, evenly or not, and merge their outputs again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

from fpipe import pytree
from fpipe.errors import BatchError
from fpipe.inputs.presplit import microbatches_of, rows_of
from fpipe.microbatches import Microbatches


@dataclass(frozen=True)
class SplitBatch:
    """A batch, split.

    Attributes:
        leaves: for each microbatch, its leaves in flat order. A leaf that is not split is the
            same tensor in all of them.
        specs: the structure of each microbatch; the same but for the order of the keys of dicts.
        rows: rows of each microbatch.
        kinds: of each microbatch; those of one kind have the same rows, shapes and order of keys.
            They are numbered in the order in which they first come.
    """

    leaves: tuple[tuple[Tensor, ...], ...]
    specs: tuple[optree.PyTreeSpec, ...]
    rows: tuple[int, ...]
    kinds: tuple[int, ...]

    @property
    def spec(self) -> optree.PyTreeSpec:
        """The structure of the first microbatch."""
        return self.specs[0]

    def biggest(self) -> int:
        """The microbatch that has most elements."""
        sizes = [sum(leaf.numel() for leaf in leaves) for leaves in self.leaves]
        return sizes.index(max(sizes))


def split(
    batch: Any, in_dims: Any, microbatches: int, *, may_lack_rows: bool = False
) -> SplitBatch:
    """Split `batch` into `microbatches` parts of equal size, or sizes that differ by one row.

    Args:
        batch: pytree of tensors, in which `fpipe.Microbatches` are split already.
        in_dims: pytree prefix of `batch` with an int (the dimension to split) or None (every
            microbatch gets the whole leaf), as in `torch.func.vmap`.
        microbatches: how many.
        may_lack_rows: there may be fewer rows than microbatches, of which the last ones have none
            then: a replica leaves them out.

    Returns:
        The microbatches. Their leaves are contiguous, and share storage with the batch's where
        they can. The first ``rows % microbatches`` microbatches have one row more.

    Raises:
        BatchError: `in_dims` is no prefix of `batch` or names a dimension that a leaf lacks;
            a leaf is no dense tensor; leaves differ in size; nothing is split; or there are fewer
            rows than microbatches.

    Example:
        >>> parts = split({"x": torch.arange(5.0)}, 0, 2)
        >>> parts.rows, [leaf.tolist() for (leaf,) in parts.leaves]
        ((3, 2), [[0.0, 1.0, 2.0], [3.0, 4.0]])
    """
    leaves, spec = pytree.tensors(
        "batch", batch, "torch.as_tensor makes one; None in in_dims means that a leaf is not split"
    )
    if pytree.number_of_parts(batch) is not None:
        return _split_rest(leaves, spec, in_dims, microbatches)
    dims = pytree.broadcast_prefix("in_dims", in_dims, batch, "batch")
    total = _count_rows(leaves, dims, spec, microbatches, may_lack_rows=may_lack_rows)
    rows = _evenly(total, microbatches)
    if total == 0:
        leaves = [_one_row(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)]
        parts = (tuple(leaves),) * microbatches
        return SplitBatch(parts, (spec,) * microbatches, rows, (0,) * microbatches)
    pairs = zip(leaves, dims, strict=True)
    columns = [_column(leaf, dim, rows) for leaf, dim in pairs]
    parts = _each(columns, microbatches)
    kinds = tuple([int(0 < size != rows[0]) for size in rows])
    return SplitBatch(parts, (spec,) * microbatches, rows, kinds)


def _split_rest(
    leaves: Sequence[Tensor], spec: optree.PyTreeSpec, in_dims: Any, microbatches: int
) -> SplitBatch:
    """`split` of a batch of which `fpipe.Microbatches` are split already."""
    specs, by_microbatch = microbatches_of(leaves, spec, in_dims, microbatches)
    rest = [None if leaf.ready else leaf.dim for leaf in by_microbatch[0]]
    splits = any(dim is not None for dim in rest)
    values = [leaf.value for leaf in by_microbatch[0]]
    total = _count_rows(values, rest, specs[0], microbatches) if splits else 0
    rows = rows_of(by_microbatch)
    if rows is None:
        rows = _evenly(total, microbatches) if splits else (1,) * microbatches
    elif splits and total != sum(rows):
        path = next(
            leaf.path for leaf, dim in zip(by_microbatch[0], rest, strict=True) if dim is not None
        )
        raise BatchError(
            f"batch{path} has {total} rows, but the Microbatches beside it have {sum(rows)}, "
            f"{' + '.join(map(str, rows))}: what is split has a row for each of theirs"
        )
    columns = [
        [_laid_out(leaf.value) for leaf in column]
        if column[0].ready
        else _column(column[0].value, column[0].dim, rows)
        for column in zip(*by_microbatch, strict=True)
    ]
    parts = _each(columns, microbatches)
    order: dict[Hashable, int] = {}
    kinds = [
        order.setdefault(
            (size, pytree.orders(structure), *(leaf.shape for leaf in flat)), len(order)
        )
        for size, structure, flat in zip(rows, specs, parts, strict=True)
    ]
    return SplitBatch(parts, specs, rows, tuple(kinds))


def _one_row(leaf: Tensor, dim: int | None) -> Tensor:
    """A microbatch's share of a leaf without rows: a trace sees its shape."""
    if dim is None:
        return leaf.contiguous()
    shape = list(leaf.shape)
    shape[dim] = 1
    return leaf.new_zeros(shape)


def _each(columns: Sequence[Sequence[Tensor]], microbatches: int) -> tuple[tuple[Tensor, ...], ...]:
    """The leaves of each microbatch, of what all of them have of each leaf."""
    return tuple(zip(*columns, strict=True)) if columns else ((),) * microbatches


def _laid_out(leaf: Tensor) -> Tensor:
    """A leaf as its shape lies by itself: the stride of one row is that of what it was cut from."""
    leaf = leaf.contiguous()
    strides = make_contiguous_strides_for(leaf.shape)
    return leaf if leaf.stride() == strides else leaf.as_strided(leaf.shape, strides)


def _evenly(rows: int, microbatches: int) -> tuple[int, ...]:
    """The rows of each microbatch."""
    whole, extra = divmod(rows, microbatches)
    return (whole + 1,) * extra + (whole,) * (microbatches - extra)


def _column(leaf: Tensor, dim: int | None, rows: Sequence[int]) -> Sequence[Tensor]:
    """The share of each microbatch in a leaf."""
    if dim is None:
        return [leaf.contiguous()] * len(rows)
    pieces = leaf.split(rows, dim)
    # Elsewhere their elements lie apart.
    in_place = dim == 0 and leaf.is_contiguous()
    return pieces if in_place else [piece.contiguous() for piece in pieces]


def _count_rows(
    leaves: Sequence[Tensor],
    dims: Sequence[Any],
    spec: optree.PyTreeSpec,
    microbatches: int,
    *,
    may_lack_rows: bool = False,
) -> int:
    """The one size that all split leaves have along their dimension."""
    first: int | None = None
    rows = 0
    for index, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if dim is None:
            continue
        if not pytree.is_dim(dim, leaf.dim()):
            raise BatchError(
                f"in_dims is {dim!r} for batch{pytree.paths(spec)[index]} of shape "
                f"{tuple(leaf.shape)}: it must be one of its dimensions, or None for a leaf that "
                "is not split"
            )
        if first is None:
            first, rows = index, leaf.shape[dim]
        elif leaf.shape[dim] != rows:
            paths = pytree.paths(spec)
            raise BatchError(
                f"batch{paths[index]} has {leaf.shape[dim]} rows along dimension {dim}, but "
                f"batch{paths[first]} has {rows}: split leaves must have the same number of rows; "
                "in_dims says which dimension holds them (None: not split)"
                + _if_split(spec, microbatches)
            )
    if first is None and microbatches == 1:
        return 1
    if first is None and not leaves:
        raise BatchError(
            f"batch={pytree.unflatten(spec, ())!r:.60} has no tensor to split into the "
            f"{microbatches} microbatches of the schedule: pass a pytree of tensors with rows"
        )
    if first is None:
        raise BatchError(
            f"in_dims={dims} splits no leaf of the batch, but the schedule has {microbatches} "
            "microbatches: give at least one leaf a dimension to split"
        )
    if may_lack_rows:
        return rows
    if rows == 0:
        raise BatchError(
            f"batch{pytree.paths(spec)[first]} has 0 rows, of which each microbatch takes one at "
            f"least (the schedule has {microbatches}): leave out steps that have no data"
        )
    if rows < microbatches:
        raise BatchError(
            f"batch{pytree.paths(spec)[first]} has {rows} rows, fewer than the {microbatches} "
            "microbatches of the schedule: pass a bigger batch, or use a schedule with "
            "fewer microbatches (pipe.with_schedule)"
        )
    return rows


def _if_split(spec: optree.PyTreeSpec, microbatches: int) -> str:
    """Advice where a batch may be meant as a sequence of microbatches."""
    children = spec.children()
    alike = all(child == children[0] and child.num_nodes > 1 for child in children)
    if spec.type not in (list, tuple) or len(children) != microbatches or not alike:
        return ""
    return "; of microbatches that are split already make fpipe.Microbatches(batch)"


@dataclass(frozen=True)
class Beneath:
    """A dimension to merge along, of tensors that transforms have put dimensions in front of.

    Attributes:
        levels: how many there are in front.
        dim: counted without them.
    """

    levels: int
    dim: int


Shape = Sequence[int]


def merge(
    columns: Sequence[Sequence[Tensor | None]],
    shapes: Sequence[Sequence[Shape]],
    spec: optree.PyTreeSpec,
    out_dims: Any,
    name: str,
) -> Any:
    """Concatenate the outputs of microbatches, the inverse of `split`.

    Args:
        columns: for each leaf, one value per microbatch, or None for a leaf that another process
            has, which stays None.
        shapes: of all of them, whoever has them: what cannot be merged is refused everywhere.
        spec: structure of an output.
        out_dims: pytree prefix of an output: the dimension to concatenate along, where leaves
            without dimensions are stacked along 0; None to keep the last microbatch's leaf;
            `fpipe.Microbatches` to leave them apart; or `Beneath`.
        name: what they are, for messages.

    Raises:
        BatchError: `out_dims` is no prefix, a leaf lacks the dimension, or microbatches differ in
            another.

    Example:
        >>> spec = pytree.structure((0, 0))
        >>> columns = [[torch.zeros(2), torch.ones(1)], [None, None]]
        >>> merge(columns, [[(2,), (1,)], [(), ()]], spec, 0, "output")
        (tensor([0., 0., 1.]), None)
    """
    whole = pytree.unflatten(spec, range(spec.num_leaves))
    dims = pytree.broadcast_prefix("out_dims", out_dims, whole, f"the {name}")
    merged: list[Any] = []
    paths = pytree.paths(spec)
    for index, (column, sizes, dim) in enumerate(zip(columns, shapes, dims, strict=True)):
        values = [value for value in column if value is not None]
        if dim is None:
            # It may be a leaf of the caller's, passed through.
            merged.append(values[-1].clone() if values else None)
            continue
        if dim is Microbatches:
            merged.append(Microbatches(value.clone() for value in values) if values else None)
            continue
        levels, inner_dim = (dim.levels, dim.dim) if isinstance(dim, Beneath) else (0, dim)
        shape = tuple(sizes[0][levels:])
        label = f"{name}{paths[index]}"
        if not shape and type(inner_dim) is int and inner_dim in (0, -1):
            _check_mergeable(sizes, None, label)
            merged.append(torch.stack(values, levels) if values else None)
        elif pytree.is_dim(inner_dim, len(shape)):
            at = inner_dim % len(shape) + levels
            _check_mergeable(sizes, at, label)
            merged.append(torch.cat(values, at) if values else None)
        else:
            raise BatchError(
                f"out_dims is {inner_dim!r} for {label} of shape {shape} per microbatch: it must "
                "be one of its dimensions, or None to keep the last microbatch's"
            )
    return pytree.unflatten(spec, merged)


def _check_mergeable(shapes: Sequence[Shape], dim: int | None, label: str) -> None:
    """Refuse values of microbatches that differ in another dimension than `dim`.

    Raises:
        BatchError: one differs.
    """
    common = [shape if dim is None else _but_for(dim, shape) for shape in shapes]
    for number, shape in enumerate(common):
        if shape != common[0]:
            raise BatchError(
                f"{label} is of shape {tuple(shapes[0])} in microbatch 0 and of shape "
                f"{tuple(shapes[number])} in microbatch {number}: outputs of microbatches may "
                "differ in their rows only, along the dimension that out_dims names; "
                "fpipe.Microbatches there leaves them apart, None keeps the last microbatch's"
            )


def _but_for(dim: int, shape: Sequence[int]) -> tuple[int, ...]:
    """A shape with any number of rows."""
    return tuple(-1 if place == dim else size for place, size in enumerate(shape))
