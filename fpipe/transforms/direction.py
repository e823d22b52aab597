"""Parameters paired with a direction: what dual functions take, made of a caller's vector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fpipe import tree
from fpipe.convention import Convention, Dual
from fpipe.errors import BatchError
from fpipe.stage.joint import is_differentiable
from fpipe.stage.trainable import Trainable
from fpipe.transforms.parts import Parts

HINT = "the gradients that step returns have the structure of a vector"


@dataclass(frozen=True)
class Direction:
    """How parameters and vector are paired.

    Attributes:
        inner: convention of the pipeline whose derivative is taken.
        parts: of the pipeline's parameters.
        trainable: which of them are trained; the others have no direction.
    """

    inner: Convention
    parts: Parts
    trainable: Trainable

    @property
    def convention(self) -> Convention:
        """This pairing as a convention."""
        return Convention(
            self.enter, self.loss, self.grads, self.out_dims, self.inner.aux_dims, vectors=1
        )

    def enter(self, params: Any, batch: Any, vector: Any) -> tuple[Any, Any]:
        """Give every stage its parameters, and the direction of each that can have one."""
        pairs = [self.parts.read(*pair) for pair in (("params", params), ("vector", vector))]
        flags = self._trained([part for _, part in pairs[0]], replace(self.trainable, within=()))
        own = [_filled(*own) for own in zip(*pairs, flags, strict=True)]
        filled = self.parts.join(own, params)
        params, packed_batch = self.inner.enter(params, batch)
        # What happens to the parameters on the way to the stages happens to their direction too.
        directions = self.parts.split(self.inner.enter(filled, batch)[0])
        moving = map(_chosen, directions, self._trained(directions, self.trainable))
        packed = list(zip(self.parts.split(params), moving, strict=True))
        return self.parts.join(packed, params), packed_batch

    def _trained(self, parts: Sequence[Any], trainable: Trainable) -> list[list[bool]]:
        """For each leaf of each part, whether it has a direction."""
        trees = [tree.flatten(part) for part in parts]
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

    def out_dims(self, out_dims: Any) -> Any:
        """The same for an output and its derivative."""
        return (self.inner.out_dims(out_dims),) * 2


def _chosen(part: Any, flags: Sequence[bool]) -> Any:
    """The part with None in place of the leaves that are not chosen."""
    leaves, spec = tree.flatten(part)
    chosen = [leaf if flag else None for leaf, flag in zip(leaves, flags, strict=True)]
    return tree.unflatten(spec, chosen)


def _filled(own: tuple[str, Any], other: tuple[str, Any], trained: Sequence[bool]) -> Any:
    """The vector's part in the structure of that of the parameters, and checked against it.

    Args:
        own: the part of the parameters, after its name.
        other: that of the vector.
        trained: whether each leaf of the parameters has a direction. Whatever the vector has for
            one that has none is not read.
    """
    (name, params), (vector_name, vector) = own, other
    if params is None:
        return None
    leaves, spec = tree.tensors(name, params, HINT)
    given, given_spec = tree.tensors(vector_name, vector, HINT)
    if given_spec != spec:
        along = _along(tree.unflatten(given_spec, given), params, trained)
        if along is None:
            raise BatchError(
                f"{vector_name} is {given_spec}, but {name} is {spec}: a vector has the structure "
                f"of the parameters, or None for what is not trained; {HINT}"
            )
        given = [leaf if own is None else own for leaf, own in zip(leaves, along, strict=True)]
    for path in _misfits(leaves, given, trained, tree.paths(spec)):
        raise BatchError(f"{vector_name}{path}: the two must agree")
    filled = [own if flag else leaf for leaf, own, flag in zip(leaves, given, trained, strict=True)]
    return tree.unflatten(spec, filled)


def _along(vector: Any, params: Any, trained: Sequence[bool]) -> list[Tensor | None] | None:
    """The direction of each leaf of a vector with None for leaves, or for whole subtrees.

    Returns:
        None for a leaf that is not trained, and in place of all if the vector does not fit.
    """
    try:
        along = tree.broadcast_prefix("vector", vector, params, "params")
    except BatchError:
        return None
    once = len(tree.flatten(vector)[0]) == sum(own is not None for own in along)
    missing = any(flag and own is None for own, flag in zip(along, trained, strict=True))
    return along if once and not missing else None


def _misfits(
    leaves: list[Tensor], given: list[Tensor], trained: Sequence[bool], paths: list[str]
) -> Iterator[str]:
    for leaf, own, flag, path in zip(leaves, given, trained, paths, strict=True):
        if flag and (own.shape, own.dtype) != (leaf.shape, leaf.dtype):
            yield (
                f"{path} is {own.dtype} of shape {tuple(own.shape)}, but the parameter is "
                f"{leaf.dtype} of shape {tuple(leaf.shape)}"
            )
