"""Arguments of a directional derivative: each with its direction, as dual stages take them.

A caller passes vectors after the batch: a direction of the parameters, or of the batch, in its
structure. Here each vector is checked against its argument, and paired with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from optree import PyTreeSpec
from torch import Tensor

from fpipe import pytree
from fpipe.errors import BatchError
from fpipe.functional.stagewise import Parts
from fpipe.inputs.signature import is_differentiable
from fpipe.spec.convention import Convention, Dual
from fpipe.spec.objective import Trainable

HINT = "the gradients that step returns have the structure of a vector"


@dataclass(frozen=True)
class DualArguments:
    """How arguments and vectors are paired.

    A vector may be None: its argument does not move, and has no gradient by its direction.

    Attributes:
        inner: convention of the pipeline whose derivative is taken.
        parts: of the pipeline's parameters.
        trainable: which of them are trained; the others have no direction.
        along: for each vector the argument along which it points, ``"params"`` or ``"batch"``.
        weighable: the derivative is that of the loss, so it can be differentiated again.
        is_partial: a vector may lack parts that other processes have, as gradients of a step do.
    """

    inner: Convention
    parts: Parts
    trainable: Trainable
    along: tuple[str, ...]
    weighable: bool
    is_partial: bool = False

    @property
    def convention(self) -> Convention:
        """The convention of the pipeline of dual stages."""
        return Convention(
            enter=self.enter,
            loss=self.loss,
            grads=self.grads,
            out_dims=self.out_dims,
            aux_dims=self.inner.aux_dims,
            batch=self.batch,
            vectors=self.along,
            weigh=self.inner.weigh if self.weighable else None,
        )

    # ── from the caller to the stages ───────────────────────────────────────────────────────────

    def enter(self, params: Any, batch: Any, *vectors: Any) -> tuple[Any, Any]:
        """Give every stage its parameters and the microbatch, each with its direction."""
        names = ["vector"] if len(vectors) == 1 else [f"vector[{n}]" for n in range(len(vectors))]
        named = dict(zip(self.along, zip(names, vectors, strict=True), strict=True))
        moving = {argument for argument, (_, vector) in named.items() if vector is not None}
        towards_params, towards_batch = params, batch
        if "params" in moving:
            towards_params = self._params_direction(params, *named["params"])
        if "batch" in moving and batch is not None:
            leaves, _ = pytree.tensors("batch", batch, HINT)
            flags = [is_differentiable(leaf) for leaf in leaves]
            towards_batch = _direction(("batch", batch), named["batch"], flags)
        # A direction goes through the inner convention as its argument does.
        params, member_batch = self.inner.enter(params, batch)
        towards_params, towards_batch = self.inner.enter(towards_params, towards_batch)
        directions = self.parts.split(towards_params)
        flags_of = [
            [flag and "params" in moving for flag in flags]
            for flags in self._have_direction(directions, self.trainable)
        ]
        chosen = map(_chosen, directions, flags_of)
        pairs = list(zip(self.parts.split(params), chosen, strict=True))
        packed = self.parts.join(pairs, params)
        if "batch" not in self.along or batch is None:
            return packed, member_batch
        flags = [
            is_differentiable(leaf) and "batch" in moving
            for leaf in pytree.flatten(towards_batch)[0]
        ]
        return packed, (member_batch, _chosen(towards_batch, flags))

    def _params_direction(self, params: Any, name: str, vector: Any) -> Any:
        """The vector of the parameters in their structure, and checked against them."""
        pairs = [self.parts.named(*pair) for pair in (("params", params), (name, vector))]
        trainable = replace(self.trainable, within=())
        flags_of = self._have_direction([tree for _, tree in pairs[0]], trainable)
        directions = [
            _direction(params_part, vector_part, flags, self.is_partial)
            for params_part, vector_part, flags in zip(*pairs, flags_of, strict=True)
        ]
        return self.parts.join(directions, params)

    def _have_direction(self, trees: Sequence[Any], trainable: Trainable) -> list[list[bool]]:
        """For each leaf of each part, whether it has a direction."""
        flat = [pytree.flatten(tree) for tree in trees]
        flags_of = trainable.flags([spec for _, spec in flat], shared=self.parts.stages is None)
        return [
            [flag and is_differentiable(leaf) for flag, leaf in zip(flags, leaves, strict=True)]
            for flags, (leaves, _) in zip(flags_of, flat, strict=True)
        ]

    # ── from the stages to the caller ───────────────────────────────────────────────────────────

    def loss(self, loss: Tensor) -> Dual:
        """The loss and its derivative, which lie side by side in the last dimension."""
        return Dual(*map(self.inner.loss, loss.unbind(-1)))

    def grads(self, grads: Any) -> Dual:
        """Gradients by the parameters, and by the vector in the structure of the parameters."""
        pairs = [(None, None) if dual is None else dual for dual in self.parts.split(grads)]
        sides = (list(side) for side in zip(*pairs, strict=True))
        return Dual(*(self.inner.grads(self.parts.join(side, grads)) for side in sides))

    def batch(self, grads: Any) -> Dual:
        """Gradients by the batch, and by its direction, if it has one."""
        by_batch, by_direction = grads if "batch" in self.along else (grads, None)
        return Dual(self.inner.batch(by_batch), self.inner.batch(by_direction))

    def out_dims(self, out_dims: Any) -> Any:
        """The dimensions of an output, and the same for its derivative."""
        return (self.inner.out_dims(out_dims),) * 2


def _chosen(tree: Any, flags: Sequence[bool]) -> Any:
    """The part with None in place of the leaves whose flag is False."""
    leaves, spec = pytree.flatten(tree)
    chosen = [leaf if flag else None for leaf, flag in zip(leaves, flags, strict=True)]
    return pytree.unflatten(spec, chosen)


def _direction(
    argument: tuple[str, Any],
    vector: tuple[str, Any],
    flags: Sequence[bool],
    is_partial: bool = False,
) -> Any:
    """The vector in the structure of its argument, and checked against it, each with its name.

    Leaves without a direction, as flags say, stand for themselves; the vector's are not read. If it
    `is_partial`, this process has no data where the vector has None.
    """
    (name, value), (vector_name, vector_value) = argument, vector
    if value is None:
        return None
    leaves, spec = pytree.tensors(name, value, HINT)
    tangents, vector_spec = pytree.tensors(vector_name, vector_value, HINT)
    if vector_spec != spec:
        required = [False] * len(leaves) if is_partial else flags
        aligned = _aligned(pytree.unflatten(vector_spec, tangents), value, required)
        if aligned is None:
            raise BatchError(
                f"{_difference(vector_name, vector_spec, name, spec)}: a vector has the structure "
                f"of what it is a direction of, or None for what is not trained; {HINT}"
            )
        tangents = [
            torch.empty_like(leaf, device="meta") if tangent is None else tangent
            for leaf, tangent in zip(leaves, aligned, strict=True)
        ]
    for path in _misfits(leaves, tangents, flags, pytree.paths(spec)):
        raise BatchError(f"{vector_name}{path}: the two must agree")
    triples = zip(leaves, tangents, flags, strict=True)
    return pytree.unflatten(spec, [tangent if flag else leaf for leaf, tangent, flag in triples])


def _aligned(vector: Any, value: Any, required: Sequence[bool]) -> list[Tensor | None] | None:
    """The direction of each leaf of a value, of a vector with None for leaves or whole subtrees.

    It is None in place of all if the vector does not fit, or lacks a direction that is required.
    """
    try:
        aligned = pytree.broadcast_prefix("vector", vector, value, "params")
    except BatchError:
        return None
    once = len(pytree.flatten(vector)[0]) == sum(tangent is not None for tangent in aligned)
    lacking = any(flag and leaf is None for leaf, flag in zip(aligned, required, strict=True))
    return aligned if once and not lacking else None


def _difference(vector_name: str, vector_spec: PyTreeSpec, name: str, spec: PyTreeSpec) -> str:
    """How two structures differ: by some of their leaves, if these tell."""
    vector_paths, paths = pytree.paths(vector_spec), pytree.paths(spec)
    missing, extra = sorted({*paths} - {*vector_paths}), sorted({*vector_paths} - {*paths})
    if "" in (*vector_paths, *paths) or not (missing or extra):
        return f"{vector_name} is {vector_spec!s:.200}, but {name} is {spec!s:.200}"
    differences = [f"lacks {', '.join(missing[:3])} of {name}"] if missing else []
    differences += [f"has {', '.join(extra[:3])}, which {name} has not"] if extra else []
    return f"{vector_name} {' and '.join(differences)}"


def _misfits(
    leaves: list[Tensor], tangents: list[Tensor], flags: Sequence[bool], paths: list[str]
) -> Iterator[str]:
    """The path of each leaf whose direction has another shape or dtype, with both."""
    for leaf, tangent, flag, path in zip(leaves, tangents, flags, paths, strict=True):
        if flag and (tangent.shape, tangent.dtype) != (leaf.shape, leaf.dtype):
            yield (
                f"{path} is {tangent.dtype} of shape {tuple(tangent.shape)}, but it is a direction "
                f"of {leaf.dtype} of shape {tuple(leaf.shape)}"
            )
