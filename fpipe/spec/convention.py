"""Calling conventions: how a transformed pipeline is called, and what it returns.

A transform changes what the stages take: stacked parameters, or parameters paired with a vector.
Its convention turns the caller's arguments into those, and gradients back into the caller's view.

    arguments ── enter ──► params, batch ── stages ──► loss, gradients ── loss, grads ──► result
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from fpipe import pytree
from fpipe.errors import StageError, check_choice
from fpipe.nn import closed, opened


def _identity(value: Any) -> Any:
    return value


def scaled(grads: Any, factor: Tensor) -> Any:
    """Gradients times a number, or one for each entry of dimension 0, where they lie."""

    def product(gradient: Tensor) -> Tensor:
        beside = factor.to(gradient.device)
        if beside.dim():
            beside = beside.reshape(-1, *[1] * (gradient.dim() - 1))
        # A product with a tensor of no dimensions has the dtype of the other factor.
        return (beside * gradient).to(gradient.dtype)

    return pytree.tree_map(product, grads)


def spared(grads: Any, weights: Tensor) -> Any:
    """Gradients of several losses, in which NaN and infinity are 0 where a loss counts nothing.

    Args:
        grads: with the losses along dimension 0.
        weights: of the losses, shape ``(losses, ...)``.
    """
    idle = (weights == 0).reshape(len(weights), -1).all(1)

    def without(gradient: Tensor) -> Tensor:
        unused = idle.to(gradient.device).view(-1, *[1] * (gradient.dim() - 1))
        return gradient.masked_fill(unused & ~gradient.isfinite(), 0)

    return pytree.tree_map(without, grads)


COTANGENT = "cotangent"
"""The names of the arguments after the batch where outputs are differentiated."""


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
        out_dims: from the caller's dimensions of an output to those of what the last stage returns.
        aux_dims: the same for aux.
        batch: from gradients in the structure of the stages' batch to what is returned.
        vectors: for each argument after the batch, the one that it is a direction of, ``"params"``
            or ``"batch"``; or `COTANGENT`.
        weigh: from gradients of the losses by the parameters, in the caller's view, and a weight
            for each of the losses, to the gradients of the weighted sum; None where the losses
            cannot be differentiated.
        state: from the state that the last microbatch has left to what is returned.
        common: from the stages' batch to the part of it that is the same on every rank.
    """

    enter: Callable[..., tuple[Any, Any]] = lambda params, batch: (params, batch)
    loss: Callable[[Tensor], Any] = _identity
    grads: Callable[[Any], Any] = _identity
    out_dims: Callable[[Any], Any] = _identity
    aux_dims: Callable[[Any], Any] = _identity
    batch: Callable[[Any], Any] = _identity
    vectors: tuple[str, ...] = ()
    weigh: Callable[[Any, Tensor], Any] | None = None
    state: Callable[[Any], Any] = _identity
    common: Callable[[Any], Any] = _identity


PLAIN = Convention(weigh=scaled)
"""The convention of a pipeline that is not transformed."""


STATE = Convention(
    enter=lambda params, state, batch: ((params, state), batch), grads=lambda grads: grads[0]
)
"""The convention of a pipeline with a state: it comes with the parameters, without a gradient."""

DEFERRED = STATE._replace(
    enter=lambda params, state, batch: ((params, opened(state)), batch), state=closed
)
"""The same with running statistics that take in those of the whole batch at once."""

BATCH_NORMS = ("microbatch", "deferred")


def called(has_state: bool, batch_norm: str) -> Convention:
    """How a pipeline that is not transformed is called.

    Raises:
        StageError: running statistics are chosen without a state to hold them, or wrongly.
    """
    check_choice("batch_norm", batch_norm, BATCH_NORMS)
    if batch_norm == "deferred" and not has_state:
        raise StageError(
            'batch_norm="deferred" is about running statistics, which a state holds: pass '
            "has_state=True, and fpipe.nn.BatchStats in the state"
        )
    if not has_state:
        return PLAIN
    return DEFERRED if batch_norm == "deferred" else STATE
