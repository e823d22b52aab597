"""vmap, per_example_grads, per_example_norms: a pipeline mapped over members, or over examples."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fpipe.errors import StageError, check_choice
from fpipe.functional.ensemble import ensemble
from fpipe.functional.example_rows import norms_of_rows, rows_as_examples
from fpipe.functional.stagewise import RANDOMNESS, refuse_argnums
from fpipe.pipelines import Pipeline
from fpipe.program.program import Program
from fpipe.schedule.arguments import plain_integer
from fpipe.spec.definition import Alone
from fpipe.transforms.wrapped_pipelines import PT, P, Wrapping, definition_of


def vmap(
    pipe: PT, in_dims: Any = None, *, randomness: str = "error", axis_size: int | None = None
) -> PT:
    """A pipeline of an ensemble: every stage, or the one function, computes all members at once.

    The members are stacked along a dimension of the parameters and, if wanted, of the batch and of
    a state; the number of members is read from the arguments of each call. The first of the two
    values of ``torch.func.stack_module_state`` can be passed as it is. Every stage becomes
    `torch.func.vmap` of itself. Attention on the CPU is traced as plain mathematics, because its
    fused kernel would run member by member.

    Args:
        pipe: the pipeline of one member. Its own ``in_dims`` describe one member's batch. Or what
            `fpipe.train` has made of it: each member then has its own parameters and state, its
            own norm, and may have its own hyperparameters, ``lr=torch.tensor([1e-3, 1e-4])``.
        in_dims: one entry for each argument of ``pipe.step``, a pytree prefix as in
            `torch.func.vmap`: the dimension that holds the members, or None for leaves that they
            share. A mapped batch leaf may be one number per member: a temperature, a weight. With
            ``has_state`` there are three, such as ``(0, 0, None)``, as there are where a vector
            follows the batch. By default ``(0, None)``: all are stacked but the batch, and so are
            a state and a vector.
        randomness: ``"different"`` or ``"same"`` for all members; ``"error"`` refuses random ops.
        axis_size: the number of members, as in ``jax.vmap``, where the arguments need not tell it:
            over a process group, a rank whose stages have no stacked parameter.

    Returns:
        A pipeline of the same kind. ``step`` returns a loss per member, shape ``(members,)``, and
        gradients, and a state, stacked as the parameters and the state are (along dimension 0 where
        those are shared); ``value`` the losses; ``forward`` outputs, and ``step`` aux, with the
        members along dimension 0, ``out_dims`` counting a member's own dimensions. Where the loss
        function returns a sum and its weight, each member's loss is over its own weights.

    Raises:
        StageError: `pipe` is no pipeline, or an argument is wrong.
        BatchError: `in_dims` does not fit the pipeline's own; or, when the pipeline is called, the
            arguments.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
        >>> stages = [lambda w, x: x * w, lambda w, x: x + w]
        >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
        >>> members = [torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)]
        >>> loss, grads = fpipe.vmap(pipe).step(members, torch.tensor([1.0, 3.0]))
        >>> loss.tolist(), grads[0].tolist(), grads[1].tolist()
        ([2.0, 4.0, 6.0], [2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    """
    if hasattr(pipe, "of_members"):
        options: Any = {"randomness": randomness, "axis_size": axis_size}
        trainer: PT = pipe.of_members(lambda inner: vmap(inner, in_dims, **options))
        return trainer
    alone: Any = pipe
    definition = definition_of("vmap", alone)
    refuse_argnums(
        "vmap", definition, "choose argnums last, as in fpipe.grad(fpipe.vmap(pipe), argnums)"
    )
    usual = tuple(None if name == "batch" else 0 for name in definition.takes)
    dims = usual if in_dims is None else in_dims
    if not isinstance(dims, list | tuple) or len(dims) != len(usual):
        raise StageError(
            f"in_dims={dims!r:.60} must be a tuple of {len(usual)}, one entry for each of "
            f"({', '.join(definition.takes)}), such as {usual}; a key, which members share, has no "
            "entry"
        )
    check_choice("randomness", randomness, RANDOMNESS)
    size = None if isinstance(axis_size, bool) else plain_integer(axis_size)
    if axis_size is not None and (size is None or size < 1):
        raise StageError(f"axis_size={axis_size!r:.60} must be a number of members, 1 or more")
    mapped: PT = type(alone)(ensemble(Alone(definition, tuple(dims), randomness, size)))
    return mapped


# ── single examples ─────────────────────────────────────────────────────────────────────────────


class ExampleNorms(NamedTuple):
    """Losses and gradient norms of examples.

    Attributes:
        loss: the loss of each example alone, shape ``(rows,)``.
        norms: the Euclidean norm of each example's gradient, over all parameters of all stages, of
            the same shape, in float32 at least.
    """

    loss: Tensor
    norms: Tensor


class ExampleNormsAux(NamedTuple):
    """Losses and gradient norms of examples, with aux, where ``has_aux=True`` was declared.

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

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.gpipe(ranks=1, microbatches=2)
        >>> pipe = fpipe.pipeline([torch.mul], lambda y, _: y.mean(), schedule, compile=False)
        >>> losses, norms = fpipe.per_example_norms(pipe).step(
        ...     [torch.tensor(3.0)], torch.tensor([1.0, 2.0])
        ... )
        >>> norms.tolist()
        [1.0, 2.0]
    """

    def step(self, params: Any, batch: Any, key: Tensor | None = None) -> Any:
        """Loss and gradient norm of each example, in the order of the rows of the batch.

        Arguments and errors are those of `Pipeline.step`. Over a process group every rank gets the
        norms, over the parameters of all ranks.

        Returns:
            An `ExampleNorms`; with ``has_aux`` an `ExampleNormsAux`.

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.gpipe(ranks=1, microbatches=2)
            >>> stage, loss = (lambda w, x: w * x), (lambda y, _: y.square().mean())
            >>> pipe = fpipe.pipeline([stage], loss, schedule, compile=False)
            >>> losses, norms = fpipe.per_example_norms(pipe).step(
            ...     [torch.tensor(3.0)], torch.tensor([1.0, 2.0])
            ... )
            >>> losses.tolist(), norms.tolist()
            ([9.0, 36.0], [6.0, 24.0])
        """
        loss, norms, *aux = self._engine.run_step(params, batch, key=key)
        return ExampleNormsAux(loss, norms, *aux) if aux else ExampleNorms(loss, norms)

    def value(self, params: Any, batch: Any, key: Tensor | None = None) -> Tensor:
        """The loss of each example; runs forward only. Arguments are those of `step`.

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.gpipe(ranks=1, microbatches=2)
            >>> stage, loss = (lambda w, x: w * x), (lambda y, _: y.square().mean())
            >>> pipe = fpipe.pipeline([stage], loss, schedule, compile=False)
            >>> norms = fpipe.per_example_norms(pipe)
            >>> norms.value([torch.tensor(3.0)], torch.tensor([1.0, 2.0])).tolist()
            [9.0, 36.0]
        """
        return self._pipeline.value(params, batch, key)

    def programs(self, params: Any, batch: Any) -> tuple[Program, ...]:
        """The program of each rank, as `Pipeline.programs` returns them.

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.gpipe(ranks=1, microbatches=2)
            >>> stage, loss = (lambda w, x: w * x), (lambda y, _: y.square().mean())
            >>> pipe = fpipe.pipeline([stage], loss, schedule, compile=False)
            >>> norms = fpipe.per_example_norms(pipe)
            >>> len(norms.programs([torch.tensor(3.0)], torch.ones(2)))
            1
        """
        return self._pipeline.programs(params, batch)


def per_example_grads(pipe: P, *, randomness: str = "error") -> P:
    """A pipeline that gives the loss and the gradient of every example.

    Each row of the batch runs as a batch of one, all rows of a microbatch at once, by
    `torch.func.vmap`; its loss and gradient are those of that row alone, without any weight. Every
    stage's parameters are read as if each row had its own copy (no memory is spent on that), so
    their gradients come apart by row.

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
    definition = definition_of("per_example_grads", pipe)
    return type(pipe)(rows_as_examples("per_example_grads", definition, randomness))


def per_example_norms(pipe: Pipeline, *, randomness: str = "error") -> NormPipeline:
    """A pipeline that gives the loss of every example and the norm of its gradient.

    It is what differentially private training clips by (Goodfellow, 2015, "Efficient per-example
    gradient computations"; Lee and Kifer, 2021, "Scaling up differentially private deep learning
    with fast per-example gradient clipping"). The gradients are those of `fpipe.per_example_grads`,
    of which each stage keeps the sums of squares alone: the gradients of one stage and one
    microbatch exist at a time. The gradients of a parameter that several stages of one function
    read are added up first, so they wait until the last stage has its part.

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
    definition = definition_of("per_example_norms", pipe)
    return NormPipeline(norms_of_rows(definition, randomness))
