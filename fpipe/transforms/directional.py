"""jvp, hvp, ggnvp: derivatives in a direction, by pipelines of dual stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from fpipe.convention import Dual
from fpipe.definition import Definition
from fpipe.engine import Pipeline
from fpipe.errors import StageError
from fpipe.runtime.program import Program
from fpipe.schedule import Schedule
from fpipe.stage.stage import Stage
from fpipe.stage.workshop import Workshop
from fpipe.transforms.direction import Direction
from fpipe.transforms.dual import (
    Takes,
    dual_function,
    dual_loss,
    dual_stage,
    gauss_newton_loss,
    load_rules,
)
from fpipe.transforms.parts import Parts
from fpipe.transforms.transformed import check_pipeline, refuse_choice, refuse_state


class Jvp(NamedTuple):
    """A loss and its derivative in a direction.

    Attributes:
        loss: as `Pipeline.value` returns it.
        jvp: the derivative, of the same shape.
    """

    loss: Tensor
    jvp: Tensor


class Hvp(NamedTuple):
    """A loss, its gradient, and the product of its second derivative with a vector.

    Attributes:
        loss: as `Pipeline.step` returns it.
        grads: as `Pipeline.step` returns them.
        hvp: the product, in the structure of the gradients.
    """

    loss: Tensor
    grads: Any
    hvp: Any


class HvpAux(NamedTuple):
    """The same where ``has_aux=True`` was declared.

    Attributes:
        loss: as in `Hvp`.
        grads: as in `Hvp`.
        hvp: as in `Hvp`.
        aux: as `Pipeline.step` returns it.
    """

    loss: Tensor
    grads: Any
    hvp: Any
    aux: Any


class Directional:
    """A pipeline whose methods take a vector beside parameters and batch; `fpipe.hvp` makes one.

    A vector has the structure, shapes and dtypes of the parameters, or of the gradients, which have
    None for what has no derivative. What it has for a parameter that is not trained is not read:
    the direction of that is 0.

    Attributes:
        definition: all that it was made from.
        pipeline: the pipeline of dual stages that it runs.
    """

    def __init__(self, definition: Definition, workshop: Workshop | None = None) -> None:
        self.definition = definition
        self.pipeline = Pipeline(definition, workshop)

    def __repr__(self) -> str:
        return f"<Directional {self.pipeline!r}>"

    def step(self, params: Any, batch: Any, vector: Any, key: Tensor | None = None) -> Any:
        """Loss, gradients and the product with the vector, from one forward and one backward.

        Args:
            params: as in `Pipeline.step`.
            batch: as in `Pipeline.step`.
            vector: the vector of the product.
            key: as in `Pipeline.step`.

        Returns:
            An `Hvp`; with ``has_aux`` an `HvpAux`.

        Raises:
            BatchError: as in `Pipeline.step`, or `vector` does not fit `params`.
            StageError: a stage cannot be traced; an op may lack a forward-mode rule.
            PipelineError: an action failed.
        """
        loss, grads, *aux = self.pipeline.run_step(params, batch, vector, key=key)
        found = Hvp(loss.primal, grads.tangent, grads.primal)
        return HvpAux(*found, *aux) if aux else found

    def value(self, params: Any, batch: Any, vector: Any, key: Tensor | None = None) -> Jvp:
        """The loss and its derivative in the direction of `vector`; runs forward only."""
        loss: Dual = self.pipeline.run_value(params, batch, vector, key=key)
        return Jvp(*loss)

    def forward(
        self,
        params: Any,
        batch: Any,
        vector: Any,
        key: Tensor | None = None,
        *,
        out_dims: Any = 0,
    ) -> Any:
        """The last stage's output and its derivative, a pair; otherwise as `Pipeline.forward`.

        The derivative has None for leaves of an integer dtype. Of one function it is the loss, as
        `value` returns it, and aux.
        """
        found = self.pipeline.run_forward(params, batch, vector, key=key, out_dims=out_dims)
        return found._replace(loss=Jvp(*found.loss)) if self.definition.function else found

    def with_schedule(self, schedule: Schedule) -> Directional:
        """The same under another schedule, as `Pipeline.with_schedule`."""
        pipe = self.pipeline.with_schedule(schedule)
        return Directional(pipe.definition, pipe.workshop)

    def local(self, params: Any) -> Any:
        """As `Pipeline.local`, of parameters or a vector."""
        return self.pipeline.local(params)

    def programs(self, params: Any, batch: Any, vector: Any) -> tuple[Program, ...]:
        """As `Pipeline.programs`."""
        return self.pipeline.programs(params, batch, vector)


def jvp(pipe: Pipeline) -> Directional:
    """Derivatives of the loss in a direction, forward only: ``jvp(pipe).value``.

    Every stage is taken as ``((p, v), (x, ẋ)) -> (y, ẏ)``, through `torch.func.jvp`, and so is the
    loss. No backward runs and no residual is kept. Fused attention has no forward-mode rule: it is
    traced as plain mathematics.

    Args:
        pipe: a pipeline, such as `fpipe.pipeline` or `fpipe.vmap` makes.

    Returns:
        A `Directional`: ``value(params, batch, vector)`` returns ``(loss, jvp)`` and ``forward``
        the output with its derivative. It is that of `fpipe.hvp`.

    Raises:
        StageError: `pipe` is no pipeline, takes a vector already, or has a state.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
        >>> stages = [lambda w, x: x * w, lambda w, x: x * w]
        >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
        >>> params = [torch.tensor(2.0), torch.tensor(3.0)]
        >>> vector = [torch.ones(()), torch.zeros(())]
        >>> fpipe.jvp(pipe).value(params, torch.ones(4), vector)
        Jvp(loss=tensor(6.), jvp=tensor(3.))
    """
    return _directional("jvp", pipe, dual_loss, stop=False)


def hvp(pipe: Pipeline) -> Directional:
    """Products of the loss's Hessian with a vector: ``hvp(pipe).step``.

    One backward of the directional derivative gives the product, and the gradient with it
    (Pearlmutter, 1994). The schedule, the split backward and the sums over microbatches are those
    of any other step. Fused attention has no forward-mode rule: it is traced as plain mathematics.

    Args:
        pipe: a pipeline, such as `fpipe.pipeline` or `fpipe.vmap` makes.

    Returns:
        A `Directional`: ``step(params, batch, vector)`` returns ``(loss, grads, hvp)``.

    Raises:
        StageError: as for `jvp`.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
        >>> stages = [lambda w, x: x * w, lambda w, x: x * w]
        >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
        >>> params = [torch.tensor(2.0), torch.tensor(3.0)]
        >>> vector = [torch.ones(()), torch.zeros(())]
        >>> loss, grads, product = fpipe.hvp(pipe).step(params, torch.ones(4), vector)
        >>> loss.item(), [g.item() for g in grads], [h.item() for h in product]
        (6.0, [3.0, 2.0], [0.0, 1.0])
    """
    return _directional("hvp", pipe, dual_loss, stop=False)


def ggnvp(pipe: Pipeline) -> Directional:
    """Products of the generalised Gauss–Newton matrix with a vector: ``ggnvp(pipe).step``.

    The matrix is J'HJ, with J the derivative of the last stage's output by the parameters and H the
    second derivative of the loss by that output (Schraudolph, 2002): positive semidefinite wherever
    the loss is convex. Each stage runs a second time for its derivative.

    Args:
        pipe: a pipeline whose loss is one number.

    Returns:
        A `Directional`: ``step(params, batch, vector)`` returns ``(loss, grads, product)``, the
        product under the name ``hvp``.

    Raises:
        StageError: as for `jvp`, or the pipeline has many losses, or is one function, which does
            not say what its output is.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
        >>> stages = [lambda w, x: x * w, lambda w, x: x * w]
        >>> pipe = fpipe.pipeline(stages, lambda y, _: y.square().mean(), schedule, compile=False)
        >>> params = [torch.tensor(2.0), torch.tensor(3.0)]
        >>> vector = [torch.ones(()), torch.zeros(())]
        >>> fpipe.ggnvp(pipe).step(params, torch.ones(4), vector).hvp
        [tensor(18.), tensor(12.)]
    """
    return _directional("ggnvp", pipe, gauss_newton_loss, stop=True)


def _directional(
    name: str,
    pipe: Pipeline,
    make_loss: Callable[[Callable[..., Any], Takes], Callable[..., Any]],
    *,
    stop: bool,
) -> Directional:
    check_pipeline(name, pipe)
    definition = pipe.definition
    refuse_choice(name, definition)
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
    if stop and definition.loss_shape:
        after = "vmap" if definition.sink.join is None else "per_example_grads"
        raise StageError(
            f"fpipe.{name} needs one loss, but this pipeline has several: transform first, and "
            f"stack afterwards, as in fpipe.{after}(fpipe.{name}(pipe))"
        )
    if stop and definition.function:
        raise StageError(
            f"fpipe.{name} is about what the last stage returns and the loss of that, but this "
            "pipeline is one function, which returns the loss alone: pass the stages as functions, "
            "fpipe.pipeline([stage, ...], loss, schedule); fpipe.hvp takes one function as well"
        )
    load_rules()
    made: dict[tuple[int, bool], Callable[..., Any]] = {}

    def dual(index: int, stage: Stage) -> Stage:
        # Stages of one function stay stages of one function, so that they are traced once.
        key = (id(stage.fn), index == 0)
        if key not in made:
            made[key] = dual_stage(stage.fn, first=index == 0, stop=stop)
        return replace(stage, fn=made[key])

    transformed = replace(
        definition,
        stages=tuple(dual(*pair) for pair in enumerate(definition.stages)),
        loss=(dual_function if definition.function else make_loss)(
            definition.loss, Takes(definition.returns, definition.loss_shape)
        ),
        loss_shape=(*definition.loss_shape, 2),
        loss_cotangent=(0.0, 1.0),
        convention=Direction(
            definition.convention, Parts.of(definition), definition.trainable
        ).convention,
        # A stage's parameters come first in the pair with their direction.
        trainable=replace(definition.trainable, within=(0, *definition.trainable.within)),
    )
    return Directional(transformed)
