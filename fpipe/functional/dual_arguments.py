"""Arguments paired with a direction: what dual functions take, made of a caller's vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from optree import PyTreeSpec
from torch import Tensor

from fpipe import pytree
from fpipe.convention import Convention, Dual
from fpipe.errors import BatchError
from fpipe.functional.parts import Parts
from fpipe.inputs.signature import is_differentiable
from fpipe.spec.trainable import Trainable

HINT = "the gradients that step returns have the structure of a vector"


@dataclass(frozen=True)
class Direction:
    """How arguments and vectors are paired.

    A vector may be None: its argument does not move, and has no gradient by its direction.

    Attributes:
        inner: convention of the pipeline whose derivative is taken.
        parts: of the pipeline's parameters.
        trainable: which of them are trained; the others have no direction.
        along: for each vector the argument along which it points, ``"params"`` or ``"batch"``.
        weighable: the derivative is that of the loss, so that it can be differentiated again.
        apart: other processes may have what a vector lacks here, as the gradients of a step do.
    """

    inner: Convention
    parts: Parts
    trainable: Trainable
    along: tuple[str, ...]
    weighable: bool
    apart: bool = False

    @property
    def convention(self) -> Convention:
        """This pairing as a convention."""
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

    def enter(self, params: Any, batch: Any, *vectors: Any) -> tuple[Any, Any]:
        """Give every stage its parameters and the microbatch, each with its direction."""
        names = ["vector"] if len(vectors) == 1 else [f"vector[{n}]" for n in range(len(vectors))]
        named = dict(zip(self.along, zip(names, vectors, strict=True), strict=True))
        moving = {argument for argument, (_, vector) in named.items() if vector is not None}
        filled, filled_batch = params, batch
        if "params" in moving:
            filled = self._vector(params, *named["params"])
        if "batch" in moving and batch is not None:
            leaves, _ = pytree.tensors("batch", batch, HINT)
            flags = [is_differentiable(leaf) for leaf in leaves]
            filled_batch = _filled(("batch", batch), named["batch"], flags)
        # What happens to the arguments on the way to the stages happens to their direction too.
        params, own_batch = self.inner.enter(params, batch)
        towards, towards_batch = self.inner.enter(filled, filled_batch)
        directions = self.parts.split(towards)
        trained = self._trained(directions, self.trainable)
        flags_of = [[own and "params" in moving for own in part] for part in trained]
        pairs = zip(self.parts.split(params), map(_chosen, directions, flags_of), strict=True)
        packed = self.parts.join(list(pairs), params)
        if "batch" not in self.along or batch is None:
            return packed, own_batch
        flags = [is_differentiable(leaf) for leaf in pytree.flatten(towards_batch)[0]]
        flags = [own and "batch" in moving for own in flags]
        return packed, (own_batch, _chosen(towards_batch, flags))

    def _vector(self, params: Any, name: str, vector: Any) -> Any:
        """The vector of the parameters in their structure, and checked against them."""
        pairs = [self.parts.read(*pair) for pair in (("params", params), (name, vector))]
        flags = self._trained([part for _, part in pairs[0]], replace(self.trainable, within=()))
        filled = [
            _filled(own, other, trained, self.apart)
            for own, other, trained in zip(*pairs, flags, strict=True)
        ]
        return self.parts.join(filled, params)

    def _trained(self, parts: Sequence[Any], trainable: Trainable) -> list[list[bool]]:
        """For each leaf of each part, whether it has a direction."""
        trees = [pytree.flatten(part) for part in parts]
        flags = trainable.flags([spec for _, spec in trees], shared=self.parts.stages is None)
        return [
            [flag and is_differentiable(leaf) for flag, leaf in zip(own, leaves, strict=True)]
            for own, (leaves, _) in zip(flags, trees, strict=True)
        ]

    def loss(self, loss: Tensor) -> Dual:
        """The loss and its derivative lie side by side in the last dimension."""
        return Dual(*map(self.inner.loss, loss.unbind(-1)))

    def grads(self, grads: Any) -> Dual:
        """Gradients by the parameters, and by the vector in the structure of the former."""
        pairs = [(None, None) if part is None else part for part in self.parts.split(grads)]
        sides = (list(side) for side in zip(*pairs, strict=True))
        return Dual(*(self.inner.grads(self.parts.join(side, grads)) for side in sides))

    def batch(self, grads: Any) -> Dual:
        """The same of the batch; without a direction it has no gradient by it."""
        own, direction = grads if "batch" in self.along else (grads, None)
        return Dual(self.inner.batch(own), self.inner.batch(direction))

    def out_dims(self, out_dims: Any) -> Any:
        """The same for an output and its derivative."""
        return (self.inner.out_dims(out_dims),) * 2


def _chosen(part: Any, flags: Sequence[bool]) -> Any:
    """The part with None in place of the leaves that are not chosen."""
    leaves, spec = pytree.flatten(part)
    chosen = [leaf if flag else None for leaf, flag in zip(leaves, flags, strict=True)]
    return pytree.unflatten(spec, chosen)


def _filled(
    own: tuple[str, Any], other: tuple[str, Any], trained: Sequence[bool], apart: bool = False
) -> Any:
    """The vector's part in the structure of that of the parameters, and checked against it.

    Args:
        own: the part of the parameters, after its name.
        other: that of the vector.
        trained: whether each leaf of the parameters has a direction. Whatever the vector has for
            one that has none is not read.
        apart: what is None has no data here, and must not be read here.
    """
    (name, params), (vector_name, vector) = own, other
    if params is None:
        return None
    leaves, spec = pytree.tensors(name, params, HINT)
    given, given_spec = pytree.tensors(vector_name, vector, HINT)
    if given_spec != spec:
        owed = [False] * len(leaves) if apart else trained
        along = _along(pytree.unflatten(given_spec, given), params, owed)
        if along is None:
            raise BatchError(
                f"{_compared(vector_name, given_spec, name, spec)}: a vector has the structure "
                f"of what it is a direction of, or None for what is not trained; {HINT}"
            )
        given = [
            torch.empty_like(leaf, device="meta") if own is None else own
            for leaf, own in zip(leaves, along, strict=True)
        ]
    for path in _misfits(leaves, given, trained, pytree.paths(spec)):
        raise BatchError(f"{vector_name}{path}: the two must agree")
    filled = [own if flag else leaf for leaf, own, flag in zip(leaves, given, trained, strict=True)]
    return pytree.unflatten(spec, filled)


def _compared(vector: str, given: PyTreeSpec, name: str, spec: PyTreeSpec) -> str:
    """How two structures differ: by some of their leaves, if by these."""
    own, other = pytree.paths(given), pytree.paths(spec)
    missing, extra = sorted({*other} - {*own}), sorted({*own} - {*other})
    if "" in (*own, *other) or not (missing or extra):
        return f"{vector} is {given!s:.200}, but {name} is {spec!s:.200}"
    found = [f"lacks {', '.join(missing[:3])} of {name}"] if missing else []
    found += [f"has {', '.join(extra[:3])}, which {name} has not"] if extra else []
    return f"{vector} {' and '.join(found)}"


def _along(vector: Any, params: Any, owed: Sequence[bool]) -> list[Tensor | None] | None:
    """The direction of each leaf of a vector with None for leaves, or for whole subtrees.

    Returns:
        None for a leaf that is not owed, and in place of all if the vector does not fit.
    """
    try:
        along = pytree.broadcast_prefix("vector", vector, params, "params")
    except BatchError:
        return None
    once = len(pytree.flatten(vector)[0]) == sum(own is not None for own in along)
    missing = any(flag and own is None for own, flag in zip(along, owed, strict=True))
    return along if once and not missing else None


def _misfits(
    leaves: list[Tensor], given: list[Tensor], trained: Sequence[bool], paths: list[str]
) -> Iterator[str]:
    for leaf, own, flag, path in zip(leaves, given, trained, paths, strict=True):
        if flag and (own.shape, own.dtype) != (leaf.shape, leaf.dtype):
            yield (
                f"{path} is {own.dtype} of shape {tuple(own.shape)}, but it is a direction of "
                f"{leaf.dtype} of shape {tuple(leaf.shape)}"
            )
