"""Refuse calls that torch refuses on real tensors, but not on abstract ones.

Without this the trace would succeed, and the first action of the step would fail, or compute
another thing than was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.checks.explain import Untraceable
from fpipe.inputs.signature import memory_of
from fpipe.trace.overrides.standin import Seeing

aten = torch.ops.aten

_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.mv.default, aten.addmv.default})
"""Products whose dtypes torch does not compare on abstract tensors; it does for all others."""


_OF_TARGETS = frozenset({aten.nll_loss_forward.default, aten.nll_loss2d_forward.default})
"""Losses whose targets are numbers of classes, in what cross entropy comes to."""


class Unchecked(Seeing):
    """Refuses wrong dtypes of products and labels, writes that overlap, views beyond the memory.

    Products and targets raise `RuntimeError`, as in torch, and the others are `Untraceable`.
    """

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Check the arguments of `func`, then call it."""
        options = kwargs or {}
        if func in _PRODUCTS:
            _check_dtypes(func, pytree.flatten((args, dict(options)))[0])
        elif func in _OF_TARGETS:
            _check_target(args[1])
        elif func is aten.as_strided.default:
            _check_reach(*args, **options)
        elif func._schema.is_mutable and torch.Tag.inplace_view not in func.tags:
            _check_overlap(func, args, options)
        return func(*args, **options)


def _check_dtypes(func: torch._ops.OpOverload, leaves: Iterable[Any]) -> None:
    dtypes = dict.fromkeys(leaf.dtype for leaf in leaves if isinstance(leaf, Tensor))
    if len(dtypes) > 1:
        names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise RuntimeError(
            f"{func} multiplies or adds {names}: give the parameters and the batch one "
            "dtype, or convert one of them with .to()"
        )


def _check_target(target: Tensor) -> None:
    if target.dtype not in (torch.int64, torch.uint8):
        name = str(target.dtype).removeprefix("torch.")
        raise RuntimeError(
            f"the labels of a cross entropy are {name}: numbers of classes must be int64, as "
            "labels.long() makes them"
        )


def _check_reach(
    value: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> None:
    start = value.storage_offset() if offset is None else offset
    end = start + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    room = value.untyped_storage().nbytes() // value.itemsize
    if 0 not in size and room and not 0 <= start <= end < room:
        raise Untraceable(
            f"takes as_strided({list(size)}, {list(stride)}, {start}) of a value of shape "
            f"{tuple(value.shape)} beyond its memory",
            "take it of the whole value, or index it",
        )


def _check_overlap(
    func: torch._ops.OpOverload, args: Sequence[Any], options: Mapping[str, Any]
) -> None:
    declared = func._schema.arguments
    pairs = [*zip(declared, args, strict=False)]
    pairs += [
        (argument, options[argument.name]) for argument in declared if argument.name in options
    ]
    dense = [
        (argument.is_write, value)
        for argument, value in pairs
        if isinstance(value, Tensor) and value.layout == torch.strided
    ]
    for written in (value for is_write, value in dense if is_write):
        if _is_folded(written):
            raise Untraceable(
                f"writes in place to a view of which several elements are one ({func}), as "
                "expand() makes them",
                "write to what it is a view of, or to a copy of it (x = x.clone())",
            )
        for is_write, read in dense:
            if not is_write and _overlap(written, read):
                raise Untraceable(
                    f"writes in place to a part of what it reads ({func})",
                    "some elements would be written before they are read; read a copy, x.clone()",
                )


def _is_folded(value: Tensor) -> bool:
    """Whether elements of a tensor may lie in the same place."""
    if 0 in value.shape:
        return False
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors lie in a part of the same memory, as far as torch looks."""
    if one is other or memory_of(one) != memory_of(other) or 0 in (one.numel(), other.numel()):
        return False
    if not (_is_dense(one) and _is_dense(other)):
        return False  # too hard for torch, too
    first, second = one.storage_offset(), other.storage_offset()
    if first == second and one.numel() == other.numel():
        return one.stride() != other.stride()
    return first < second + other.numel() and second < first + one.numel()


def _is_dense(value: Tensor) -> bool:
    reach = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if stride != reach:
                return False
            reach *= size
    return True
