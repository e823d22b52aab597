"""Calling conventions: how a transformed pipeline is called, and what it returns.

A transform changes what the stages take: stacked parameters, or parameters paired with a vector.
Its convention turns the caller's arguments into those, and gradients back into the caller's view.

    arguments ── enter ──► params, batch ── stages ──► loss, gradients ── loss, grads ──► result
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from fpipe import tree


def _identity(value: Any) -> Any:
    return value


def scaled(grads: Any, cotangent: Tensor) -> Any:
    """Every gradient of one loss, multiplied."""
    return tree.tree_map(lambda gradient: (cotangent * gradient).to(gradient.dtype), grads)


class Dual(NamedTuple):
    """A value and its derivative in a direction, as a transform hands gradients of both back.

    Attributes:
        primal: for the value.
        tangent: for the derivative.
    """

    primal: Any
    tangent: Any


class Convention(NamedTuple):
    """Functions between a caller's view of a pipeline and that of its stages.

    Attributes:
        enter: from ``(params, batch, *vectors)`` to the ``(params, batch)`` of the stages. The
            batch keeps its structure, and may be None.
        loss: from the tensor that the pipeline computes to what is returned for it.
        grads: from gradients in the structure of the stages' params to what is returned.
        batch: from gradients in the structure of the stages' batch to what is returned.
        out_dims: from the caller's dimensions of an output to those of what the last stage returns.
        vectors: how many arguments there are beside params and batch.
        weigh: from the gradients as `grads` returns them, and a weight for each of the losses, to
            the gradients of the weighted sum; None where the losses cannot be differentiated.
    """

    enter: Callable[..., tuple[Any, Any]] = lambda params, batch: (params, batch)
    loss: Callable[[Tensor], Any] = _identity
    grads: Callable[[Any], Any] = _identity
    out_dims: Callable[[Any], Any] = _identity
    batch: Callable[[Any], Any] = _identity
    vectors: int = 0
    weigh: Callable[[Any, Tensor], Any] | None = None


PLAIN = Convention(weigh=scaled)
"""Of a pipeline that is not transformed."""
