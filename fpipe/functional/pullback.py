"""The definition of a pipeline's vector-Jacobian product: the loss becomes ⟨cotangent, outputs⟩.

    microbatch, cotangent ─► the stages, of the microbatch ─► y ─► Re ⟨cotangent, y⟩

The cotangent is split as the output is merged, so a microbatch comes with its own rows of it, and
the gradients of the sum over microbatches are those of a loss over the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce, wraps
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.errors import BatchError, StageError, label_of
from fpipe.functional.stagewise import each_stage
from fpipe.inputs.signature import is_differentiable
from fpipe.microbatches import Microbatches
from fpipe.spec.convention import COTANGENT, Convention
from fpipe.spec.definition import Definition
from fpipe.spec.user_functions import Returns, Taken


def pullback(definition: Definition, out_dims: Any) -> Definition:
    """The definition of a pipeline that takes a cotangent of its outputs after the batch.

    Args:
        definition: of the pipeline whose outputs are differentiated.
        out_dims: pytree prefix of the outputs: the dimensions along which they are merged.

    Raises:
        StageError: it has no such derivative; says why.
    """
    _check(definition)
    inner = definition.convention
    if definition.function:
        loss = _function_product(definition.loss, definition.returns)
    else:
        loss = _output_product
    return replace(
        definition,
        stages=each_stage(definition.stages, _without_cotangent),
        loss=loss,
        in_dims=(definition.in_dims, pytree.prefix_map(_split_dim, out_dims)),
        has_aux=False,
        reduction="sum",
        convention=inner._replace(
            enter=partial(_entered, inner, definition.in_dims, out_dims),
            batch=lambda grads: inner.batch(grads[0]),
            common=itemgetter(0),  # the cotangent is read on one rank alone
            vectors=(COTANGENT,),
            weigh=None,
        ),
    )


def _check(definition: Definition) -> None:
    refusal = ""
    if definition.convention.vectors:
        refusal = "a pipeline that takes a vector already: take it of the pipeline itself"
    elif definition.loss_shape or definition.sink.join is not None:
        refusal = "an ensemble, or one that goes by rows: take it of the pipeline of one member"
    elif definition.function and not definition.has_aux:
        refusal = (
            "one function that returns a loss and no output: let it return (loss, aux), under "
            "has_aux=True"
        )
    if refusal:
        raise StageError(f"fpipe.vjp of {refusal}")


# ── arguments ───────────────────────────────────────────────────────────────────────────────────


def _entered(inner: Convention, in_dims: Any, out_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    """Put the cotangent beside the batch, if it has a row for each of the batch's."""
    *inner_arguments, cotangent = arguments
    params, batch = inner.enter(*inner_arguments)
    if (batch is None) != (cotangent is None):
        raise BatchError(
            f"batch={batch!r:.40} and cotangent={cotangent!r:.40}: a rank passes both of them, "
            "or neither"
        )
    if batch is None:
        return params, None
    _check_rows(batch, in_dims, cotangent, out_dims)
    return params, (batch, cotangent)


def _check_rows(batch: Any, in_dims: Any, cotangent: Any, out_dims: Any) -> None:
    leaves, _ = pytree.tensors("batch", batch, "torch.as_tensor makes one")
    dims = pytree.broadcast_prefix("in_dims", in_dims, batch, "batch")
    rows = None
    # Each part of `fpipe.Microbatches` has rows of its own, which `_product` checks.
    if pytree.number_of_parts((batch, cotangent)) is None:
        pairs = zip(leaves, dims, strict=True)
        rows = next((v.shape[d] for v, d in pairs if pytree.is_dim(d, v.dim())), None)
    weights, spec = pytree.tensors(COTANGENT, cotangent, "None where there is none")
    dims = pytree.broadcast_prefix("out_dims", out_dims, cotangent, "the cotangent")
    not_in_parts = frozenset(pytree.places_of_rest(spec))
    named = zip(pytree.paths(spec), weights, dims, strict=True)
    for place, (path, leaf, dim) in enumerate(named):
        if dim is Microbatches and place in not_in_parts:
            raise BatchError(
                f"cotangent{path} is of an output that out_dims leaves apart: it must be "
                "fpipe.Microbatches, with one part for each"
            )
        if dim is None:
            raise BatchError(
                f"cotangent{path} is of an output of which the last microbatch's is kept alone "
                "(None in out_dims): give out_dims the dimension of its rows, or pass None"
            )
        if rows is not None and (not pytree.is_dim(dim, leaf.dim()) or leaf.shape[dim] != rows):
            raise BatchError(
                f"cotangent{path} of shape {tuple(leaf.shape)} must have {rows} rows along "
                f"dimension {dim}, as the batch has: a derivative by outputs is of those with "
                "a row for each row of the batch"
            )


def _split_dim(dim: Any) -> Any:
    """The dimension along which a cotangent is split, None where it is split already."""
    return None if dim is Microbatches else dim


# ── stages and loss ─────────────────────────────────────────────────────────────────────────────


def _without_cotangent(function: Callable[..., Any], first: bool) -> Callable[..., Any]:
    """The stage, which does not see the cotangent."""

    @wraps(function)
    def stage(params: Any, x: Any, *microbatch: Any, **key: Tensor) -> Any:
        return function(params, x[0] if first else x, *(pair[0] for pair in microbatch), **key)

    return stage


def _output_product(y: Any, microbatch: Any) -> Tensor:
    return _product(y, microbatch[1])


def _function_product(function: Callable[..., Any], returns: Returns) -> Callable[..., Any]:
    """The product of one function's aux with its cotangent."""
    name = label_of(function)

    @wraps(function)
    def loss(*arguments: Any, **key: Tensor) -> Any:
        *before, (batch, cotangent) = arguments
        results = function(*before, batch, **key)
        taken = returns.take(f"{name} returns", returns.call, results)
        product = _product(taken.aux, cotangent)
        return Returns(state=returns.state).written(Taken((product,), taken.state, None))

    return loss


def _product(y: Any, cotangent: Any) -> Tensor:
    """The real part of the sum of the products of all elements, in float32 at least."""
    leaves, spec = pytree.flatten(y)
    places = pytree.unflatten(spec, range(len(leaves)))
    try:
        weights = pytree.broadcast_prefix("cotangent", cotangent, places, "the output")
    except BatchError as error:
        raise StageError(str(error)) from error
    terms = []
    for path, value, weight in zip(pytree.paths(spec), leaves, weights, strict=True):
        if weight is None:
            continue
        is_alike = weight.shape == value.shape and weight.dtype == value.dtype
        if not is_alike or not is_differentiable(value):
            raise StageError(
                f"cotangent{path} is {weight.dtype} of shape {tuple(weight.shape)} in a "
                f"microbatch, and the output {value.dtype} of shape {tuple(value.shape)}: they "
                "must be alike, and a leaf that is no floating-point or complex number has None"
            )
        product = weight.conj() * value
        real = product.real if product.is_complex() else product
        terms.append(real.sum(dtype=torch.promote_types(real.dtype, torch.float32)))
    if not terms:
        raise StageError("the cotangent has None for all that comes out: give one tensor at least")
    return reduce(torch.add, terms)
