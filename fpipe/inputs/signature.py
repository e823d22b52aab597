"""Shapes without data: what a step depends on apart from the numbers, as comparable values.

They are hashable, so that plans can be kept by them, and picklable, so that ranks can tell each
other what they were given.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, Final, Literal, NamedTuple

import optree
import torch
from torch import Tensor

from fpipe import pytree
from fpipe.errors import BatchError
from fpipe.inputs.ambient import Ambient
from fpipe.inputs.split_batch import SplitBatch

log = logging.getLogger("fpipe")

Goal = Literal["step", "value", "forward", "update", "clip"]
"""The results of a call: loss and gradients, the loss alone, or the last stage's output; or a step
whose stages are updated within, without its gradients or with them, to be clipped."""

UPDATING: Final[frozenset[Goal]] = frozenset({"update", "clip"})
"""Steps with an optimizer."""


class Spec(NamedTuple):
    """Shape and dtype of a dense tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


class LeafShape(NamedTuple):
    """All that tracing can see of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> LeafShape:
        """The shape of a real or a fake tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        """A tensor of this shape."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    @lru_cache(maxsize=4096)  # noqa: B019  # it is asked in each step, and holds numbers alone
    def brought_to(self, device: torch.device) -> LeafShape:
        """That of a copy on another device; of one without data the same."""
        if self.device.type == "meta":
            return self
        bare = self._replace(device=torch.device("meta")).empty()
        stride = self.stride if is_dense(bare) else bare.to("meta", copy=True).stride()
        return self._replace(device=device, stride=stride)


class TreeShape(NamedTuple):
    """A pytree of tensors without their data.

    Attributes:
        spec: its structure.
        leaves: their shapes.
        orders: of the keys of its dicts, in which a function may go through them; with types.
    """

    spec: optree.PyTreeSpec
    leaves: tuple[LeafShape, ...]
    orders: tuple[Any, ...]

    @classmethod
    def of(cls, spec: optree.PyTreeSpec, leaves: Sequence[Tensor]) -> TreeShape:
        """The shape of a flat pytree."""
        return cls(spec, tuple(map(LeafShape.of, leaves)), pytree.orders(spec))

    def on(self, device: torch.device) -> TreeShape:
        """The same shapes on another device."""
        return self._replace(leaves=tuple(leaf._replace(device=device) for leaf in self.leaves))

    def brought_to(self, device: torch.device) -> TreeShape:
        """Those of copies on another device; of what has no data the same."""
        return self._replace(leaves=tuple(leaf.brought_to(device) for leaf in self.leaves))

    def with_data(self, device: torch.device) -> TreeShape:
        """The same shapes, on `device` where they lie on the meta device, which has no data."""
        return self._replace(
            leaves=tuple(
                leaf._replace(device=device) if leaf.device.type == "meta" else leaf
                for leaf in self.leaves
            )
        )


class Signature(NamedTuple):
    """The key of a plan.

    Attributes:
        goal: what is asked for.
        params: the parameters of each stage.
        rows: rows of each microbatch.
        kinds: of each microbatch; those of one kind have the same rows, shapes and order of keys.
        batch: a microbatch of each kind.
        ambient: what else a trace depends on.
    """

    goal: Goal
    params: tuple[TreeShape, ...]
    rows: tuple[int, ...]
    kinds: tuple[int, ...]
    batch: tuple[TreeShape, ...]
    ambient: Ambient

    def sizes(self) -> list[int]:
        """The rows of a microbatch of each kind; one where a replica has none."""
        return [max(1, self.rows[first]) for first in firsts(self.kinds)]


def warn_of_other_rows(signature: Signature) -> None:
    """Warn of leaves whose rows seem to lie along dimension 1, and which were split along 0.

    Such are position ids of shape [3, rows, tokens], beside tokens of shape [rows, tokens], if
    there happen to be as many rows as the first dimension has.
    """
    total = sum(signature.rows)
    for rows, batch in zip(signature.sizes(), signature.batch, strict=True):
        shapes = dict(
            zip(pytree.paths(batch.spec), (leaf.shape for leaf in batch.leaves), strict=True)
        )
        for path, shape in shapes.items():
            split_so = len(shape) > 2 and shape[:2] == (rows, total) and rows != total
            if not split_so or shape[1] == shape[2]:
                continue
            like = [other for other, its in shapes.items() if its == (rows, *shape[2:])]
            if like:
                log.warning(
                    "batch%s of shape %s is split along dimension 0, but each of its %d entries "
                    "there has the shape of batch%s: if its rows lie along dimension 1, name that "
                    "with in_dims, or None where all microbatches read the whole",
                    path,
                    (total, *shape[1:]),
                    total,
                    like[0],
                )


def brought_to(signature: Signature, device: torch.device) -> Signature:
    """The signature of the same tensors on one device, but for those that have no data.

    Each stage may read any leaf of the parameters.
    """
    params = (signature.params[0].brought_to(device),) * len(signature.params)
    batch = tuple(shape.brought_to(device) for shape in signature.batch)
    return signature._replace(params=params, batch=batch)


def with_data(signature: Signature, devices: Sequence[torch.device] | None) -> Signature:
    """The signature of tensors that have data where its own lie on the meta device.

    Args:
        signature: of what may have shapes alone.
        devices: the device of each stage, None for the CPU.
    """
    home = torch.device("cpu")
    params = [
        shape.with_data(home if devices is None else devices[stage])
        for stage, shape in enumerate(signature.params)
    ]
    batch = [shape.with_data(home) for shape in signature.batch]
    return signature._replace(params=tuple(params), batch=tuple(batch))


def refuse_without_data(signature: Signature) -> None:
    """Refuse to run on tensors that have shapes alone.

    Raises:
        BatchError: names the first that lies on the meta device.
    """
    whole = all(shape is signature.params[0] for shape in signature.params)
    trees = [
        ("params" if whole else f"params[{stage}]", shape)
        for stage, shape in enumerate(signature.params)
    ]
    for name, shape in (*trees, *(("batch", shape) for shape in signature.batch)):
        for path, leaf in zip(pytree.paths(shape.spec), shape.leaves, strict=True):
            if leaf.device.type == "meta":
                raise BatchError(
                    f"{name}{path} lies on the meta device (or is a FakeTensor), so it has a shape "
                    "and no data: pipe.programs takes such tensors; a step takes real ones"
                )


def refuse_elsewhere(params: Sequence[TreeShape], but: frozenset[int]) -> None:
    """Refuse parameters that do not live on the CPU, where a policy says that they do.

    Args:
        params: of each stage.
        but: leaves that are no parameters.

    Raises:
        BatchError: names the first.
    """
    for stage, shape in enumerate(params):
        for number, leaf in enumerate(shape.leaves):
            if leaf.device.type not in ("cpu", "meta") and number not in but:
                path = pytree.paths(shape.spec)[number]
                whole = all(other is shape for other in params)
                name = "params" if whole else f"params[{stage}]"
                raise BatchError(
                    f"{name}{path} lies on {leaf.device}, and offload_policy keeps parameters on "
                    "the CPU: pipe.place(params) puts them there"
                )


def firsts(kinds: Sequence[int]) -> list[int]:
    """The first microbatch of each kind.

    Example:
        >>> firsts([0, 0, 1, 0])
        [0, 2]
    """
    first_of: dict[int, int] = {}
    for microbatch, kind in enumerate(kinds):
        first_of.setdefault(kind, microbatch)
    return list(first_of.values())


def batch_shapes(parts: SplitBatch) -> tuple[TreeShape, ...]:
    """The shape of a microbatch of each kind."""
    return tuple(
        TreeShape.of(parts.specs[first], parts.leaves[first]) for first in firsts(parts.kinds)
    )


def device_of_keys(leaves: Sequence[Tensor]) -> torch.device:
    """Where keys lie in one process: with the first leaf of the microbatch."""
    return leaves[0].device if leaves else torch.device("cpu")


def difference(before: Signature, now: Signature) -> str:
    """The first thing in which two signatures of one goal differ, in words."""
    for stage, (old, new) in enumerate(zip(before.params, now.params, strict=True)):
        if change := _tree_difference(old, new):
            return f"the parameters of stage {stage} changed: {change}"
    kinds, known = (
        set(zip(signature.sizes(), signature.batch, strict=True)) for signature in (now, before)
    )
    divisions = {(signature.rows, signature.kinds) for signature in (now, before)}
    if sum(before.rows) == sum(now.rows) and len(divisions) > 1 and kinds <= known:
        return "microbatches of these shapes come in another order or number"
    # A new microbatch is compared with the one that was in its place; where a batch was split
    # evenly, the bigger one comes first.
    for number, (size, new) in enumerate(zip(now.sizes(), now.batch, strict=True)):
        old = before.batch[min(number, len(before.batch) - 1)]
        if (size, new) not in known and (change := _tree_difference(old, new)):
            return f"the microbatch changed: {change}"
    if before.rows != now.rows:
        return f"the batch has {sum(now.rows)} rows, before {sum(before.rows)}"
    if now.ambient.modes != before.ambient.modes:
        return (
            "the module has another mode (train, eval), other parts, attributes "
            "of layers, buffers or hooks"
        )
    return (
        "autocast, the default dtype or device, the choice of kernels (deterministic ones, those "
        "of attention, the precision of products) or the number of threads changed"
    )


def _tree_difference(before: TreeShape, now: TreeShape) -> str:
    if before.spec != now.spec:
        return "it has another structure"
    if before.orders != now.orders:
        return f"its keys are {unlike_keys(before, now)}"
    for path, old, new in zip(pytree.paths(now.spec), before.leaves, now.leaves, strict=True):
        if old != new:
            texts = [f"{in_words(leaf)} on {leaf.device}" for leaf in (new, old)]
            if texts[0] == texts[1]:
                texts = [f"{texts[0]} of strides {leaf.stride}" for leaf in (new, old)]
            return f"{path or 'it'} is {texts[0]}, was {texts[1]}"
    return ""


def unlike_keys(one: TreeShape, other: TreeShape) -> str:
    """In what the keys of two trees of equal structure differ, in words."""
    same = all(
        set(ours) == set(theirs) for ours, theirs in zip(one.orders, other.orders, strict=True)
    )
    return "in another order" if same else "of another type"


def is_dense(value: Tensor) -> bool:
    """Whether it lies in memory without gaps, and no element twice: then so do its copies."""
    return value.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense.default(value))


def memory_of(value: Tensor) -> int:
    """Equal for tensors that share their memory, which they keep."""
    # A functional tensor, which a trace has, uses the memory of the tensor that it wraps.
    return getattr(value, "elem", value).untyped_storage()._cdata


def extent_of(value: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte, and behind its last."""
    steps = zip(value.shape, value.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size()


def is_differentiable(value: Tensor) -> bool:
    """Whether a value of this dtype can have a gradient."""
    return value.dtype.is_floating_point or value.dtype.is_complex


def in_words(leaf: Tensor | LeafShape) -> str:
    """Dtype and shape for a message, such as ``float32[2, 3]``."""
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
