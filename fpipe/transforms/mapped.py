"""per_example_grads, per_example_norms: every row of the batch is a batch of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.convention import COTANGENT, PLAIN, Convention, spared
from fpipe.definition import Definition
from fpipe.engine import Pipeline
from fpipe.errors import StageError, check_choice
from fpipe.functional.batching import over
from fpipe.functional.forward_mode import batched
from fpipe.functional.stagewise import (
    RANDOMNESS,
    P,
    check_pipeline,
    each_stage,
    refuse_choice,
    refuse_state,
)
from fpipe.inputs.signature import is_differentiable
from fpipe.microbatches import Microbatches
from fpipe.program.program import Program
from fpipe.spec.objective import Sink
from fpipe.transforms.wrapped_pipelines import Wrapping


class ExampleNorms(NamedTuple):
    """Losses and gradient norms of examples.

    Attributes:
        loss: the loss of each example alone.
        norms: the Euclidean norm of each example's gradient, over all parameters of all stages.
    """

    loss: Tensor
    norms: Tensor


class ExampleNormsAux(NamedTuple):
    """The same where ``has_aux=True`` was declared.

    Attributes:
        loss: as in `ExampleNorms`.
        norms: as in `ExampleNorms`.
        aux: as `fpipe.per_example_grads` returns it.
    """

    loss: Tensor
    norms: Tensor
    aux: Any


class NormPipeline(Wrapping):
    """A pipeline that returns norms of gradients; `fpipe.per_example_norms` makes one.

    Attributes:
        definition: all that it was made from.
        pipeline: the pipeline that it runs.
    """

    def step(self, params: Any, batch: Any, key: Tensor | None = None) -> Any:
        """Loss and gradient norm of each example, in the order of the rows of the batch.

        Arguments and errors are those of `Pipeline.step`. Over a process group every rank gets the
        norms, over the parameters of all ranks.

        Returns:
            An `ExampleNorms`; with ``has_aux`` an `ExampleNormsAux`.
        """
        loss, norms, *aux = self.pipeline.run_step(params, batch, key=key)
        return ExampleNormsAux(loss, norms, *aux) if aux else ExampleNorms(loss, norms)

    def value(self, params: Any, batch: Any, key: Tensor | None = None) -> Tensor:
        """The loss of each example; runs forward only."""
        return self.pipeline.value(params, batch, key)

    def programs(self, params: Any, batch: Any) -> tuple[Program, ...]:
        """As `Pipeline.programs`."""
        return self.pipeline.programs(params, batch)


def per_example_grads(pipe: P, *, randomness: str = "error") -> P:
    """A pipeline that gives the loss and the gradient of every example.

    Each row of the batch runs as a batch of one, all rows of a microbatch at once; its loss and
    gradient are those of that row alone, without any weight. Every stage's parameters are read as
    if each row had its own copy (no memory is spent on that), so their gradients come apart by row.

    Args:
        pipe: a pipeline, such as `fpipe.pipeline`, `fpipe.vmap` or `fpipe.hvp` makes.
        randomness: ``"different"`` or ``"same"`` for all rows of a microbatch; ``"error"`` refuses
            random ops.

    Returns:
        A pipeline of the same kind. ``step`` returns losses and gradients, and aux, with the rows
        of the batch along a new first dimension; ``value`` the losses; ``forward`` the outputs of
        the batches of one, along a new first dimension too. Where the loss function returns a sum
        and its weight, the loss of a row is its sum over its weight: NaN where that is 0.

    Raises:
        StageError: `pipe` is no pipeline, goes by rows already, or has a state.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
        >>> stages = [lambda w, x: x * w, lambda w, x: x * w]
        >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
        >>> params = [torch.tensor(2.0), torch.tensor(3.0)]
        >>> batch = torch.tensor([1.0, 10.0, 100.0])
        >>> loss, grads = fpipe.per_example_grads(pipe).step(params, batch)
        >>> loss.tolist(), grads[0].tolist()
        ([6.0, 60.0, 600.0], [3.0, 30.0, 300.0])
    """
    check_pipeline("per_example_grads", pipe)
    return type(pipe)(_by_rows("per_example_grads", pipe.definition, randomness))


def per_example_norms(pipe: Pipeline, *, randomness: str = "error") -> NormPipeline:
    """A pipeline that gives the loss of every example and the norm of its gradient.

    It is `fpipe.per_example_grads` of which each stage keeps the sums of squares alone: the
    gradients of one stage and one microbatch exist at a time. Those of a parameter that several
    stages of one function read are added up first, so they wait until the last stage has its part.

    Args:
        pipe: a pipeline, such as `fpipe.pipeline` or `fpipe.vmap` makes.
        randomness: as in `fpipe.per_example_grads`.

    Returns:
        A `NormPipeline`, whose ``step`` returns ``(loss, norms)``, one of each per row; for an
        ensemble ``(rows, members)``.

    Raises:
        StageError: as for `per_example_grads`, or `pipe` takes a vector.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
        >>> stages = [lambda w, x: x * w, lambda w, x: x * w]
        >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
        >>> params = [torch.tensor(4.0), torch.tensor(3.0)]
        >>> batch = torch.tensor([1.0, 10.0, 100.0])
        >>> fpipe.per_example_norms(pipe).step(params, batch).norms.tolist()
        [5.0, 50.0, 500.0]
    """
    check_pipeline("per_example_norms", pipe)
    definition = pipe.definition
    if definition.convention.vectors:
        raise StageError(
            "fpipe.per_example_norms of a pipeline that takes a vector would mix the norms of two "
            "products: take fpipe.per_example_grads of it, or the norms of the pipeline itself"
        )
    kept = 1 + len(definition.loss_shape)
    by_rows = _by_rows("per_example_norms", definition, randomness)
    squared = replace(
        by_rows,
        sink=replace(by_rows.sink, fold=partial(_squares, kept), everywhere=True),
        convention=by_rows.convention._replace(grads=_norms, weigh=None),
    )
    return NormPipeline(squared)


def _squares(kept: int, gradient: Tensor) -> Tensor:
    """The sum of squares over all dimensions but the first `kept`, in single precision at least."""
    g = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    squares = (g.conj() * g).real if g.is_complex() else g.square()
    return squares.flatten(kept).sum(kept) if squares.dim() > kept else squares


def _norms(squares: list[Tensor]) -> Tensor:
    return torch.stack(squares).sum(0).sqrt()


def _by_rows(name: str, definition: Definition, randomness: str) -> Definition:
    if definition.sink.join is not None:
        raise StageError(f"fpipe.{name} of a pipeline that goes by rows already: apply it once")
    if COTANGENT in definition.convention.vectors:
        raise StageError(
            f"fpipe.{name} of fpipe.vjp(pipe) is not defined: a loss of single examples is that of "
            "the pipeline itself"
        )
    refuse_choice(
        name, definition, 'fpipe.grad(pipe, "batch") has the gradient by a row in that row already'
    )
    refuse_state(name, definition, "rows that are batches of one would each leave another state")
    check_choice("randomness", randomness, RANDOMNESS)
    in_dims = definition.in_dims

    def rowwise(function: Callable[..., Any], first: bool) -> Callable[..., Any]:
        return _stage(function, in_dims, randomness, first=first)

    if definition.function:  # a first stage that returns the loss already
        loss = rowwise(definition.loss, True)
    else:
        loss = _loss(definition.loss, in_dims, randomness)
    inner = definition.convention
    out_dims = _first_of(inner.out_dims)
    aux_dims = _first_of(inner.aux_dims)
    convention = inner._replace(out_dims=out_dims, aux_dims=aux_dims, weigh=_weigh(inner))
    if inner is not PLAIN:
        convention = Convention(
            enter=inner.enter,
            loss=lambda loss: over(inner.loss, [loss], [0]),
            grads=lambda grads: over(inner.grads, [grads], [0]),
            out_dims=out_dims,
            aux_dims=aux_dims,
            vectors=inner.vectors,
            weigh=_weigh(inner),
        )
    return replace(
        definition,
        stages=each_stage(definition.stages, rowwise),
        loss=loss,
        loss_shape=(None, *definition.loss_shape),
        sink=Sink(lift=_repeat, join=0),
        convention=convention,
        alone=None,
    )


def _weigh(inner: Convention) -> Callable[[Any, Tensor], Any] | None:
    """The gradients of a sum of all rows' losses, each with its weight."""
    one = inner.weigh
    if one is None:
        return None
    return lambda grads, weights: pytree.tree_map(
        lambda leaf: leaf.sum(0), over(one, [spared(grads, weights), weights], [0, 0])
    )


def _stage(
    function: Callable[..., Any], in_dims: Any, randomness: str, *, first: bool
) -> Callable[..., Any]:
    """A stage function over all rows of a microbatch, whose parameters have a first dimension."""

    @wraps(function)
    def stage(params: Any, x: Any, *microbatch: Any, **key: Tensor) -> Any:
        def one(own: Any, value: Any, *row: Any) -> Any:
            value = _whole(value, in_dims) if first else value
            return function(own, value, *(_whole(r, in_dims) for r in row), **key)

        dims = pytree.tree_map(lambda leaf: 0 if is_differentiable(leaf) else None, params)
        devices = {leaf.device.type for leaf in pytree.flatten((params, x))[0]}
        with batched(devices):
            return over(
                one,
                [params, x, *microbatch],
                [dims, in_dims if first else 0, *(in_dims for _ in microbatch)],
                randomness,
            )

    return stage


def _loss(function: Callable[..., Any], in_dims: Any, randomness: str) -> Callable[..., Any]:
    """The losses of all rows of a microbatch."""

    @wraps(function)
    def loss(y: Any, microbatch: Any) -> Any:
        return over(
            lambda own, row: function(own, _whole(row, in_dims)),
            [y, microbatch],
            [0, in_dims],
            randomness,
        )

    return loss


def _whole(row: Any, in_dims: Any) -> Any:
    """One row of a microbatch as a microbatch of one."""
    leaves, spec = pytree.flatten(row)
    dims = pytree.broadcast_prefix("in_dims", in_dims, row, "the microbatch")
    return pytree.unflatten(
        spec,
        [v if dim is None else v.unsqueeze(dim) for v, dim in zip(leaves, dims, strict=True)],
    )


def _repeat(leaf: Tensor, rows: int) -> Tensor:
    # Forward mode lays a tangent out as its primal, and copies it there where it is laid out
    # otherwise: not to where all rows are one.
    return leaf.contiguous().expand(rows, *leaf.shape)


def _first_of(dims_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Outputs are stacked along a first dimension, whatever they are made of."""
    return lambda dims: pytree.prefix_map(_first, dims_of(dims))


def _first(dim: Any) -> Any:
    return dim if dim is None or dim is Microbatches else 0
