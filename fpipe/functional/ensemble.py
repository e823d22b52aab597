"""vmap: a pipeline of vmapped stages is an ensemble of pipelines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.convention import COTANGENT
from fpipe.definition import Alone, Definition
from fpipe.errors import BatchError, StageError, check_choice
from fpipe.functional.batching import over
from fpipe.functional.ensemble_arguments import Members, behind
from fpipe.functional.forward_mode import batched
from fpipe.functional.parts import Parts
from fpipe.functional.stagewise import (
    RANDOMNESS,
    P,
    check_pipeline,
    each_stage,
    refuse_choice,
)
from fpipe.microbatches import Microbatches
from fpipe.schedule.arguments import plain_integer
from fpipe.spec.objective import Sink


def vmap(
    pipe: P, in_dims: Any = None, *, randomness: str = "error", axis_size: int | None = None
) -> P:
    """A pipeline of an ensemble: every stage, or the one function, computes all members at once.

    The members are stacked along a dimension of the parameters and, if wanted, of the batch and of
    a state; the number of members is read from the arguments of each call. The first of the two
    values of ``torch.func.stack_module_state`` can be passed as it is. Attention on the CPU is
    traced as plain mathematics, because its fused kernel would run member by member.

    Args:
        pipe: the pipeline of one member. Its own ``in_dims`` describe one member's batch.
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
    check_pipeline("vmap", pipe)
    definition = pipe.definition
    refuse_choice(
        "vmap", definition, "choose argnums last, as in fpipe.grad(fpipe.vmap(pipe), argnums)"
    )
    usual = tuple(None if name == "batch" else 0 for name in definition.takes)
    chosen = usual if in_dims is None else in_dims
    _check(chosen, randomness, definition.takes, usual)
    size = None if isinstance(axis_size, bool) else plain_integer(axis_size)
    if axis_size is not None and (size is None or size < 1):
        raise StageError(f"axis_size={axis_size!r:.60} must be a number of members, 1 or more")
    return type(pipe)(ensemble(Alone(definition, tuple(chosen), randomness, size)))


def _check(in_dims: Any, randomness: str, takes: Sequence[str], usual: tuple[Any, ...]) -> None:
    if not isinstance(in_dims, list | tuple) or len(in_dims) != len(takes):
        raise StageError(
            f"in_dims={in_dims!r:.60} must be a tuple of {len(takes)}, one entry for each of "
            f"({', '.join(takes)}), such as {usual}; a key, which members share, has no entry"
        )
    check_choice("randomness", randomness, RANDOMNESS)


def ensemble(alone: Alone) -> Definition:
    """The definition of the pipeline of all members."""
    definition, in_dims, randomness, size = alone
    if COTANGENT in definition.convention.vectors:
        raise StageError(
            "fpipe.vmap of fpipe.vjp(pipe) is not defined: differentiate each member's outputs by "
            "itself"
        )
    # Stages see one microbatch, and so one of them.
    in_dims = pytree.map_nodes(_same_in_all, in_dims, Microbatches)
    place = definition.takes.index("batch")
    given = in_dims[place]
    if "batch" in definition.convention.vectors:
        given = given, 0  # it comes with its direction, which is stacked
    batch_dims = pytree.prefix_map(lambda dim: None if dim is None else 0, given)

    def mapped(function: Callable[..., Any], first: bool) -> Callable[..., Any]:
        return _stage(function, batch_dims if first else 0, batch_dims, randomness)

    if definition.function:
        # A first stage that returns the loss already; a state comes before the batch.
        loss = mapped(definition.loss, not definition.has_state)
    else:
        loss = _loss(definition.loss, batch_dims, randomness)
    return replace(
        definition,
        stages=each_stage(definition.stages, mapped),
        loss=loss,
        in_dims=pytree.join_prefixes(
            given,
            definition.in_dims,
            lambda member, row: row if member is None else behind(row),
            (f"in_dims[{place}]", "the pipeline's in_dims"),
        ),
        loss_shape=(None, *definition.loss_shape),
        convention=Members(
            in_dims, definition.convention, Parts.of(definition), definition.has_state, size
        ).convention,
        sink=_mapped_sink(definition.sink),
        # The members come first among a stage's parameters.
        trainable=replace(definition.trainable, within=(1, *definition.trainable.within)),
        alone=alone._replace(in_dims=in_dims),
    )


def _same_in_all(parts: Microbatches[Any]) -> Any:
    """The prefix that all microbatches of the caller have.

    Raises:
        BatchError: members are stacked in some of them alone.
    """
    if len({pytree.hashable_prefix(part) for part in parts}) != 1:
        raise BatchError(
            f"in_dims={parts!r:.60} must be the same for all microbatches: members are stacked "
            "along the same dimensions in all parts of Microbatches"
        )
    return parts[0]


def stacked_along(definition: Definition, arguments: Sequence[Any]) -> list[int | None]:
    """The dimension of the members in each flat leaf of an ensemble's arguments, None: shared."""
    assert definition.alone is not None
    one, in_dims, *_ = definition.alone
    return Members(in_dims, one.convention, Parts.of(one)).dims(arguments)


def _mapped_sink(sink: Sink) -> Sink:
    """The same for gradients with the members in front."""
    if sink.everywhere:
        raise StageError(
            "fpipe.vmap of a pipeline that returns norms: stack first, and take the norms "
            "afterwards, as in fpipe.per_example_norms(fpipe.vmap(pipe))"
        )
    lift, join = sink.lift, sink.join
    if lift is None or join is None:
        return sink

    def lifted(leaf: Tensor, rows: int) -> Tensor:
        found: Tensor = torch.vmap(lambda own: lift(own, rows))(leaf)
        return found

    return replace(sink, lift=lifted, join=join + 1)


def _stage(
    function: Callable[..., Any], x_dims: Any, batch_dims: Any, randomness: str
) -> Callable[..., Any]:
    """A stage function over all members; the microbatch follows if the stage reads it.

    They share the key.
    """

    @wraps(function)
    def stage(packed: Any, *values: Any, **key: Tensor) -> Any:
        members, params = packed
        devices = {leaf.device.type for leaf in pytree.flatten(values)[0]}
        with batched(devices):
            return over(
                lambda _, *own: function(*own, **key),
                [members, params, *values],
                [0, 0, x_dims, batch_dims][: 2 + len(values)],
                randomness,
            )

    return stage


def _loss(function: Callable[..., Any], batch_dims: Any, randomness: str) -> Callable[..., Any]:
    """The losses of all members."""

    @wraps(function)
    def loss(y: Any, microbatch: Any) -> Any:
        return over(function, [y, microbatch], [0, batch_dims], randomness)

    return loss
