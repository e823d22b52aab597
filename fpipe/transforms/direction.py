"""Parameters paired with a direction: what dual functions take, made of a caller's vector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fpipe import tree
from fpipe.convention import Convention, Dual
from fpipe.errors import BatchError
from fpipe.stage.joint import is_differentiable
from fpipe.transforms.parts import Parts

HINT = "the gradients that step returns have the structure of a vector"


@dataclass(frozen=True)
class Direction:
    """How parameters and vector are paired.

    Attributes:
        inner: convention of the pipeline whose derivative is taken.
        parts: of the pipeline's parameters.
    """

    inner: Convention
    parts: Parts

    @property
    def convention(self) -> Convention:
        """This pairing as a convention."""
        return Convention(self.enter, self.loss, self.grads, self.out_dims, vectors=1)

    def enter(self, params: Any, batch: Any, vector: Any) -> tuple[Any, Any]:
        """Give every stage its parameters, and the direction of each that can have one."""
        pairs = [self.parts.read(*pair) for pair in (("params", params), ("vector", vector))]
        filled = self.parts.join([_filled(*own) for own in zip(*pairs, strict=True)])
        params, packed_batch = self.inner.enter(params, batch)
        # What happens to the parameters on the way to the stages happens to their direction too.
        directions, _ = self.inner.enter(filled, batch)
        moving = tree.tree_map(lambda leaf: leaf if is_differentiable(leaf) else None, directions)
        packed = list(zip(*map(self.parts.split, (params, moving)), strict=True))
        return self.parts.join(packed), packed_batch

    def loss(self, loss: Tensor) -> Dual:
        """The loss and its derivative lie side by side in the last dimension."""
        return Dual(*map(self.inner.loss, loss.unbind(-1)))

    def grads(self, grads: Any) -> Dual:
        """Gradients by the parameters, and by the vector in the structure of the former."""
        pairs = [(None, None) if part is None else part for part in self.parts.split(grads)]
        sides = (list(side) for side in zip(*pairs, strict=True))
        return Dual(*(self.inner.grads(self.parts.join(side)) for side in sides))

    def out_dims(self, out_dims: Any) -> Any:
        """The same for an output and its derivative."""
        return (self.inner.out_dims(out_dims),) * 2


def _filled(own: tuple[str, Any], other: tuple[str, Any]) -> Any:
    """The vector's part in the structure of that of the parameters, and checked against it.

    Args:
        own: the part of the parameters, after its name.
        other: that of the vector.

    A leaf that cannot have a gradient has no direction either: whatever stands there is not read.
    """
    (name, params), (vector_name, vector) = own, other
    if params is None:
        return None
    leaves, spec = tree.tensors(name, params, HINT)
    given, given_spec = tree.tensors(vector_name, vector, HINT)
    trained = [is_differentiable(leaf) for leaf in leaves]
    if given_spec != spec:
        wanted = tree.unflatten(
            spec, [leaf if flag else None for leaf, flag in zip(leaves, trained, strict=True)]
        )
        if given_spec != tree.structure(wanted):
            raise BatchError(
                f"{vector_name} is {given_spec}, but {name} is {spec}: a vector has the structure "
                f"of the parameters; {HINT}"
            )
        rest = iter(given)
        given = [next(rest) if flag else leaf for leaf, flag in zip(leaves, trained, strict=True)]
    for path in _misfits(leaves, given, trained, tree.paths(spec)):
        raise BatchError(f"{vector_name}{path}: the two must agree")
    return tree.unflatten(spec, given)


def _misfits(
    leaves: list[Tensor], given: list[Tensor], trained: list[bool], paths: list[str]
) -> Iterator[str]:
    for leaf, own, flag, path in zip(leaves, given, trained, paths, strict=True):
        if flag and (own.shape, own.dtype) != (leaf.shape, leaf.dtype):
            yield (
                f"{path} is {own.dtype} of shape {tuple(own.shape)}, but the parameter is "
                f"{leaf.dtype} of shape {tuple(leaf.shape)}"
            )
