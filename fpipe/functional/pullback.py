"""Gradients of what comes out, each element weighed: the loss becomes its product with a cotangent.

    microbatch, cotangent ─► the stages, of the microbatch ─► y ─► Re ⟨cotangent, y⟩

The cotangent is split as the output is merged, so a microbatch comes with its own rows of it, and
the gradients of the sum over microbatches are those of a loss over the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce, wraps
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.convention import COTANGENT, Convention
from fpipe.definition import Definition
from fpipe.errors import BatchError, StageError, label_of
from fpipe.functional.stagewise import P, check_pipeline, each_stage
from fpipe.inputs.presplit import is_dim
from fpipe.inputs.signature import is_differentiable
from fpipe.microbatches import Microbatches
from fpipe.spec.returns import Returns, Taken


def vjp(pipe: P) -> P:
    """A pipeline whose ``step`` takes a cotangent of what `pipe` puts out, in place of a loss.

    It is the backward of a loss over the whole batch, which is no mean over microbatches, such as
    that of contrastive learning: ``pipe.forward`` gives the outputs of all rows, the caller the
    gradient of the loss by them, and ``vjp(pipe).step`` the gradients by the parameters. The
    forward runs twice, so that activations are held for a microbatch at a time (Gao et al., 2021,
    "Scaling deep contrastive learning batch size under memory limited setup"). In one process
    ``pipe.forward`` under autograd does all this by itself.

    Args:
        pipe: a pipeline, such as `fpipe.pipeline` or `fpipe.grad` makes. Of one function it must
            declare ``has_aux``: what comes out is aux.

    Returns:
        A pipeline of the same kind, whose ``step(params, batch, cotangent)`` returns
        ``(product, grads)``: the sum over all elements of cotangent times output (of complex ones
        the real part of the product with the conjugate), in float32 at least, and its gradients.
        The cotangent has the structure, shapes and dtypes of the output, with None for leaves that
        are to have none, such as integers. With a state, which follows the parameters, the new one
        is returned. Over a process group every rank that passes the batch passes a cotangent of
        these shapes, of which only the ranks whose stages put something out read the numbers.

    Raises:
        StageError: `pipe` is no pipeline, puts nothing out, takes a vector already, is an ensemble,
            or goes by rows.
        BatchError: when it is called, the cotangent does not fit.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
        >>> stages = [lambda w, x: x * w, lambda w, x: x * w]
        >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
        >>> params, batch = [torch.tensor(2.0), torch.tensor(3.0)], torch.tensor([1.0, 2.0])
        >>> pipe.forward(params, batch)
        tensor([ 6., 12.])
        >>> product, grads = fpipe.vjp(pipe).step(params, batch, torch.tensor([1.0, -1.0]))
        >>> product.item(), [g.item() for g in grads]
        (-6.0, [-3.0, -2.0])
    """
    check_pipeline("vjp", pipe)
    return type(pipe)(pullback(pipe.definition, pipe.definition.out_dims))


def pullback(definition: Definition, out_dims: Any) -> Definition:
    """The definition of what `vjp` returns, of outputs that are merged along `out_dims`."""
    _check(definition)
    whole = definition.function
    inner = definition.convention
    return replace(
        definition,
        stages=each_stage(definition.stages, _without),
        loss=_of_function(definition.loss, definition.returns) if whole else _of_output,
        in_dims=(definition.in_dims, pytree.prefix_map(_of_rows, out_dims)),
        has_aux=False,
        reduction="sum",
        convention=inner._replace(
            enter=_Entrance(inner, definition.in_dims, out_dims),
            batch=lambda grads: inner.batch(grads[0]),
            common=itemgetter(0),  # the cotangent is read on one rank alone
            vectors=(COTANGENT,),
            weigh=None,
        ),
    )


def _check(definition: Definition) -> None:
    refused = ""
    if definition.convention.vectors:
        refused = "a pipeline that takes a vector already: take it of the pipeline itself"
    elif definition.loss_shape or definition.sink.join is not None:
        refused = "an ensemble, or one that goes by rows: take it of the pipeline of one member"
    elif definition.function and not definition.has_aux:
        refused = (
            "one function that returns a loss and no output: let it return (loss, aux), under "
            "has_aux=True"
        )
    if refused:
        raise StageError(f"fpipe.vjp of {refused}")


@dataclass(frozen=True)
class _Entrance:
    """Puts the cotangent beside the batch, if it has a row for each of the batch's."""

    inner: Convention
    in_dims: Any
    out_dims: Any

    def __call__(self, *arguments: Any) -> tuple[Any, Any]:
        *given, cotangent = arguments
        params, batch = self.inner.enter(*given)
        if (batch is None) != (cotangent is None):
            raise BatchError(
                f"batch={batch!r:.40} and cotangent={cotangent!r:.40}: a rank passes both of them, "
                "or neither"
            )
        if batch is None:
            return params, None
        self._check_rows(batch, cotangent)
        return params, (batch, cotangent)

    def _check_rows(self, batch: Any, cotangent: Any) -> None:
        leaves, _ = pytree.tensors("batch", batch, "torch.as_tensor makes one")
        dims = pytree.broadcast_prefix("in_dims", self.in_dims, batch, "batch")
        rows = None
        # Of what is split already each microbatch has its own, looked at where it is read.
        if pytree.number_of_parts((batch, cotangent)) is None:
            pairs = zip(leaves, dims, strict=True)
            rows = next((v.shape[d] for v, d in pairs if is_dim(d, v.dim())), None)
        own, spec = pytree.tensors(COTANGENT, cotangent, "None where there is none")
        dims = pytree.broadcast_prefix("out_dims", self.out_dims, cotangent, "the cotangent")
        whole = frozenset(pytree.places_of_rest(spec))
        leaves_of = zip(pytree.paths(spec), own, dims, strict=True)
        for place, (path, leaf, dim) in enumerate(leaves_of):
            if dim is Microbatches and place in whole:
                raise BatchError(
                    f"cotangent{path} is of an output that out_dims leaves apart: it must be "
                    "fpipe.Microbatches, with one part for each"
                )
            if dim is None:
                raise BatchError(
                    f"cotangent{path} is of an output of which the last microbatch's is kept alone "
                    "(None in out_dims): give out_dims the dimension of its rows, or pass None"
                )
            if rows is not None and (not is_dim(dim, leaf.dim()) or leaf.shape[dim] != rows):
                raise BatchError(
                    f"cotangent{path} of shape {tuple(leaf.shape)} must have {rows} rows along "
                    f"dimension {dim}, as the batch has: a derivative by outputs is of those with "
                    "a row for each row of the batch"
                )


def _of_rows(dim: Any) -> Any:
    """The dimension of rows of a cotangent, None where it is split already."""
    return None if dim is Microbatches else dim


def _without(function: Callable[..., Any], first: bool) -> Callable[..., Any]:
    """The stage, which does not see the cotangent."""

    @wraps(function)
    def stage(params: Any, x: Any, *microbatch: Any, **key: Tensor) -> Any:
        return function(params, x[0] if first else x, *(own[0] for own in microbatch), **key)

    return stage


def _of_output(y: Any, microbatch: Any) -> Tensor:
    return _product(y, microbatch[1])


def _of_function(function: Callable[..., Any], returns: Returns) -> Callable[..., Any]:
    """One function, of which aux is what comes out."""
    name = label_of(function)

    @wraps(function)
    def loss(*arguments: Any, **key: Tensor) -> Any:
        *given, (batch, cotangent) = arguments
        found = function(*given, batch, **key)
        taken = returns.take(f"{name} returns", returns.call, found)
        product = _product(taken.aux, cotangent)
        return Returns(state=returns.state).written(Taken((product,), taken.state, None))

    return loss


def _product(y: Any, cotangent: Any) -> Tensor:
    """The real part of the sum of the products of all elements."""
    leaves, spec = pytree.flatten(y)
    places = pytree.unflatten(spec, range(len(leaves)))
    try:
        weights = pytree.broadcast_prefix("cotangent", cotangent, places, "the output")
    except BatchError as error:
        raise StageError(str(error)) from error
    terms = []
    for path, value, own in zip(pytree.paths(spec), leaves, weights, strict=True):
        if own is None:
            continue
        if own.shape != value.shape or own.dtype != value.dtype or not is_differentiable(value):
            raise StageError(
                f"cotangent{path} is {own.dtype} of shape {tuple(own.shape)} in a microbatch, and "
                f"the output {value.dtype} of shape {tuple(value.shape)}: they must be alike, and "
                "a leaf that is no floating-point or complex number has None"
            )
        product = own.conj() * value
        real = product.real if product.is_complex() else product
        terms.append(real.sum(dtype=torch.promote_types(real.dtype, torch.float32)))
    if not terms:
        raise StageError("the cotangent has None for all that comes out: give one tensor at least")
    return reduce(torch.add, terms)
