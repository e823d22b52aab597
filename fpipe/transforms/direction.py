"""Parameters paired with a direction: what dual stages take, made of a caller's vector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fpipe import tree
from fpipe.convention import Convention, Dual
from fpipe.errors import BatchError
from fpipe.parameters import check_parts
from fpipe.stage.joint import is_differentiable

HINT = "the gradients that step returns have the structure of a vector"


@dataclass(frozen=True)
class Direction:
    """How parameters and vector are paired.

    Attributes:
        inner: convention of the pipeline whose derivative is taken.
        num_stages: of the pipeline.
    """

    inner: Convention
    num_stages: int

    @property
    def convention(self) -> Convention:
        """This pairing as a convention."""
        return Convention(self.enter, self.loss, self.grads, self.out_dims, vectors=1)

    def enter(self, params: Any, batch: Any, vector: Any) -> tuple[Any, Any]:
        """Give every stage its parameters, and the direction of each that can have one."""
        for name, value in (("params", params), ("vector", vector)):
            check_parts(name, value, self.num_stages)
        filled = [
            _filled(part, own, stage)
            for stage, (part, own) in enumerate(zip(params, vector, strict=True))
        ]
        params, packed_batch = self.inner.enter(params, batch)
        # What happens to the parameters on the way to the stages happens to their direction too.
        directions, _ = self.inner.enter(filled, batch)
        packed = [
            (part, tuple(leaf for leaf in tree.flatten(own)[0] if is_differentiable(leaf)))
            for part, own in zip(params, directions, strict=True)
        ]
        return packed, packed_batch

    def loss(self, loss: Tensor) -> Dual:
        """The loss and its derivative lie side by side in the last dimension."""
        return Dual(*map(self.inner.loss, loss.unbind(-1)))

    def grads(self, grads: Any) -> Dual:
        """Gradients by the parameters, and by the vector in the structure of the former."""
        primal = [part if part is None else part[0] for part in grads]
        tangent = [
            part if part is None else tree.unflatten(tree.structure(part[0]), part[1])
            for part in grads
        ]
        return Dual(self.inner.grads(primal), self.inner.grads(tangent))

    def out_dims(self, out_dims: Any) -> Any:
        """The same for an output and its derivative."""
        return (self.inner.out_dims(out_dims),) * 2


def _filled(params: Any, vector: Any, stage: int) -> Any:
    """The vector of one stage in the structure of its parameters, and checked against them.

    A leaf that cannot have a gradient has no direction either: whatever stands there is not read.
    """
    if params is None:
        return None
    leaves, spec = tree.tensors(f"params[{stage}]", params, HINT)
    given, given_spec = tree.tensors(f"vector[{stage}]", vector, HINT)
    trained = [is_differentiable(leaf) for leaf in leaves]
    if given_spec != spec:
        wanted = tree.unflatten(
            spec, [leaf if flag else None for leaf, flag in zip(leaves, trained, strict=True)]
        )
        if given_spec != tree.structure(wanted):
            raise BatchError(
                f"vector[{stage}] is {given_spec}, but params[{stage}] is {spec}: a vector has the "
                f"structure of the parameters; {HINT}"
            )
        rest = iter(given)
        given = [next(rest) if flag else leaf for leaf, flag in zip(leaves, trained, strict=True)]
    for path in _misfits(leaves, given, trained, tree.paths(spec)):
        raise BatchError(f"vector[{stage}]{path}: the two must agree")
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
