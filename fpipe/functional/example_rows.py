"""The definition of a pipeline of single examples: every row of the batch is a batch of its own.

    stage of a microbatch    becomes    `torch.func.vmap` of itself over the rows
    its parameters           are read as if each row had a copy, so gradients come apart by row

Norms of the gradients (Goodfellow, 2015, "Efficient per-example gradient computations"; Lee and
Kifer, 2021, "Scaling up differentially private deep learning with fast per-example gradient
clipping") need the squares of each microbatch's gradients alone, whatever the layers are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.errors import StageError, check_choice
from fpipe.functional.batching import batching_rules, vmap_pytrees
from fpipe.functional.stagewise import RANDOMNESS, each_stage, refuse_argnums, refuse_state
from fpipe.inputs.signature import is_differentiable
from fpipe.microbatches import Microbatches
from fpipe.spec.convention import COTANGENT, PLAIN, Convention, spared
from fpipe.spec.definition import Definition
from fpipe.spec.objective import Sink


def rows_as_examples(name: str, definition: Definition, randomness: str) -> Definition:
    """The definition of the pipeline that returns the loss and the gradient of every row.

    Raises:
        StageError: the definition has no such transform; says why, with the name of the transform.
    """
    if definition.sink.join is not None:
        raise StageError(f"fpipe.{name} of a pipeline that goes by rows already: apply it once")
    if COTANGENT in definition.convention.vectors:
        raise StageError(
            f"fpipe.{name} of fpipe.vjp(pipe) is not defined: a loss of single examples is that of "
            "the pipeline itself"
        )
    refuse_argnums(
        name, definition, 'fpipe.grad(pipe, "batch") has the gradient by a row in that row already'
    )
    refuse_state(name, definition, "rows that are batches of one would each leave another state")
    check_choice("randomness", randomness, RANDOMNESS)
    in_dims = definition.in_dims

    def rowwise(function: Callable[..., Any], first: bool) -> Callable[..., Any]:
        return _rowwise_stage(function, in_dims, randomness, first=first)

    if definition.function:  # a first stage that returns the loss already
        loss = rowwise(definition.loss, True)
    else:
        loss = _rowwise_loss(definition.loss, in_dims, randomness)
    return replace(
        definition,
        stages=each_stage(definition.stages, rowwise),
        loss=loss,
        loss_shape=(None, *definition.loss_shape),
        sink=Sink(lift=_repeated, join=0),
        convention=_of_rows(definition.convention),
        alone=None,
    )


def norms_of_rows(definition: Definition, randomness: str) -> Definition:
    """The definition of the pipeline that returns the loss and the gradient norm of every row.

    Every stage keeps sums of squares alone. Arguments and errors are those of `rows_as_examples`.
    """
    if definition.convention.vectors:
        raise StageError(
            "fpipe.per_example_norms of a pipeline that takes a vector would mix the norms of two "
            "products: take fpipe.per_example_grads of it, or the norms of the pipeline itself"
        )
    kept_dims = 1 + len(definition.loss_shape)
    by_rows = rows_as_examples("per_example_norms", definition, randomness)
    return replace(
        by_rows,
        sink=replace(by_rows.sink, fold=partial(_sum_of_squares, kept_dims), everywhere=True),
        convention=by_rows.convention._replace(grads=_norms, weigh=None),
    )


# ── stages and loss ─────────────────────────────────────────────────────────────────────────────


def _rowwise_stage(
    function: Callable[..., Any], in_dims: Any, randomness: str, *, first: bool
) -> Callable[..., Any]:
    """A stage function over all rows of a microbatch, whose parameters have the rows in front."""

    @wraps(function)
    def stage(params: Any, x: Any, *microbatch: Any, **key: Tensor) -> Any:
        def of_row(row_params: Any, row_x: Any, *row: Any) -> Any:
            row_x = _batch_of_one(row_x, in_dims) if first else row_x
            return function(row_params, row_x, *(_batch_of_one(r, in_dims) for r in row), **key)

        dims = pytree.tree_map(lambda leaf: 0 if is_differentiable(leaf) else None, params)
        devices = {leaf.device.type for leaf in pytree.flatten((params, x))[0]}
        with batching_rules(devices):
            return vmap_pytrees(
                of_row,
                [params, x, *microbatch],
                [dims, in_dims if first else 0, *(in_dims for _ in microbatch)],
                randomness,
            )

    return stage


def _rowwise_loss(
    function: Callable[..., Any], in_dims: Any, randomness: str
) -> Callable[..., Any]:
    """The losses of all rows of a microbatch."""

    @wraps(function)
    def loss(y: Any, microbatch: Any) -> Any:
        return vmap_pytrees(
            lambda row_y, row: function(row_y, _batch_of_one(row, in_dims)),
            [y, microbatch],
            [0, in_dims],
            randomness,
        )

    return loss


def _batch_of_one(row: Any, in_dims: Any) -> Any:
    """One row of a microbatch as a microbatch of one."""

    def unsqueezed(leaf: Tensor, dim: int | None) -> Tensor:
        return leaf if dim is None else leaf.unsqueeze(dim)

    return pytree.map_with_prefix(unsqueezed, "in_dims", in_dims, row, "the microbatch")


# ── gradients ───────────────────────────────────────────────────────────────────────────────────


def _repeated(leaf: Tensor, rows: int) -> Tensor:
    """A parameter for each of the rows, without memory of their own."""
    # Forward mode lays a tangent out as its primal, and copies it there if it lies otherwise. An
    # expanded leaf, whose rows are one memory, would not do: it must be contiguous before.
    return leaf.contiguous().expand(rows, *leaf.shape)


def _sum_of_squares(kept_dims: int, gradient: Tensor) -> Tensor:
    """The sum of squares over all dimensions but the first ones, in single precision at least."""
    g = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    squares = (g.conj() * g).real if g.is_complex() else g.square()
    return squares.flatten(kept_dims).sum(kept_dims) if squares.dim() > kept_dims else squares


def _norms(squares: list[Tensor]) -> Tensor:
    """The norms over all parameters."""
    return torch.stack(squares).sum(0).sqrt()


def _of_rows(inner: Convention) -> Convention:
    """The convention of a pipeline, for the losses and gradients of all rows."""
    stacked = inner._replace(
        out_dims=_stacked_first(inner.out_dims),
        aux_dims=_stacked_first(inner.aux_dims),
        weigh=_weigh_rows(inner),
    )
    if inner is PLAIN:
        return stacked
    return stacked._replace(
        loss=lambda loss: vmap_pytrees(inner.loss, [loss], [0]),
        grads=lambda grads: vmap_pytrees(inner.grads, [grads], [0]),
    )


def _weigh_rows(inner: Convention) -> Callable[[Any, Tensor], Any] | None:
    """The gradients of a sum of all rows' losses, each with its weight."""
    weigh = inner.weigh
    if weigh is None:
        return None
    return lambda grads, weights: pytree.tree_map(
        lambda leaf: leaf.sum(0), vmap_pytrees(weigh, [spared(grads, weights), weights], [0, 0])
    )


def _stacked_first(dims_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Outputs are stacked along a first dimension, whatever their own dimensions are."""
    return lambda dims: pytree.prefix_map(_first, dims_of(dims))


def _first(dim: Any) -> Any:
    return dim if dim is None or dim is Microbatches else 0
