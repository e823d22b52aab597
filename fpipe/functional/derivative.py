"""The definition of a pipeline's derivative in a direction: every stage becomes its dual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from fpipe.definition import Definition
from fpipe.errors import StageError
from fpipe.functional.dual import (
    Takes,
    dual_function,
    dual_loss,
    dual_stage,
    gauss_newton_loss,
    load_rules,
)
from fpipe.functional.dual_arguments import Direction
from fpipe.functional.parts import Parts
from fpipe.functional.stagewise import each_stage, refuse_state


def derivative(
    name: str, definition: Definition, along: tuple[str, ...], *, gauss_newton: bool = False
) -> Definition:
    """The definition of a pipeline of dual stages.

    Args:
        name: of the transform, for messages.
        definition: of the pipeline whose derivative is taken.
        along: the arguments that move, ``"params"`` and ``"batch"``: for each the result takes a
            vector after the batch, or None for one that stays.
        gauss_newton: cut the second derivative of the stages off.

    Returns:
        A definition whose losses come with their derivatives, and whose gradients are those by
        the arguments and by the vectors.

    Raises:
        StageError: there is no such derivative; says why.
    """
    refuse_state(name, definition, "what a state owes to the parameters has no derivative")
    if definition.convention.vectors:
        raise StageError(
            f"fpipe.{name} of a pipeline that takes a vector already would be a third derivative: "
            "take one derivative in a direction, and fpipe.vmap it for several at once"
        )
    if definition.sink.everywhere:
        raise StageError(
            f"fpipe.{name} of a pipeline that returns norms would mix those of two products: take "
            "it of the pipeline itself"
        )
    if gauss_newton:
        _check_gauss_newton(name, definition)
    load_rules()
    moves = "batch" in along

    def dual(function: Callable[..., Any], first: bool) -> Callable[..., Any]:
        return dual_stage(function, first=first, moves=moves, stop=gauss_newton)

    make_loss = partial(dual_function if definition.function else dual_loss, moves=moves)
    takes = Takes(definition.returns, definition.loss_shape)
    return replace(
        definition,
        stages=each_stage(definition.stages, dual),
        loss=(gauss_newton_loss if gauss_newton else make_loss)(definition.loss, takes),
        in_dims=(definition.in_dims,) * 2 if moves else definition.in_dims,
        loss_shape=(*definition.loss_shape, 2),
        loss_cotangent=(0.0, 1.0),
        convention=Direction(
            definition.convention,
            Parts.of(definition),
            definition.trainable,
            along,
            weighable=not gauss_newton,
            apart=definition.group is not None,
        ).convention,
        # A stage's parameters come first in the pair with their direction.
        trainable=replace(definition.trainable, within=(0, *definition.trainable.within)),
        alone=None,
    )


def _check_gauss_newton(name: str, definition: Definition) -> None:
    if definition.loss_shape:
        after = "vmap" if definition.sink.join is None else "per_example_grads"
        raise StageError(
            f"fpipe.{name} needs one loss, but this pipeline has several: transform first, and "
            f"stack afterwards, as in fpipe.{after}(fpipe.{name}(pipe))"
        )
    if definition.function:
        raise StageError(
            f"fpipe.{name} is about what the last stage returns and the loss of that, but this "
            "pipeline is one function, which returns the loss alone: pass the stages as functions, "
            "fpipe.pipeline([stage, ...], loss, schedule); fpipe.hvp takes one function as well"
        )
