"""The definition of a pipeline's derivative in a direction: every stage becomes its dual.

    (p, v), (x, ẋ)  ──►  (y, ẏ),   ẏ = ∂y/∂p · v + ∂y/∂x · ẋ

A chain of duals and a loss that is taken the same way compute a loss and its directional
derivative. The gradient of that derivative by v is the gradient of the loss, and its gradient by p
is the product of the Hessian with v: one backward gives both (Pearlmutter, 1994, "Fast exact
multiplication by the Hessian").

If the derivative is cut off from p, what is left is J'Hv through the output alone, the Gauss–Newton
product (Schraudolph, 2002, "Fast curvature matrix-vector products for second-order gradient
descent").

`fpipe.functional.dual_arguments` pairs the arguments with their directions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, jvp

from fpipe import pytree
from fpipe.errors import StageError, label_of
from fpipe.functional.dual_arguments import DualArguments
from fpipe.functional.forward_mode import differentiable_twice
from fpipe.functional.stagewise import Parts, each_stage, refuse_state
from fpipe.inputs.signature import is_differentiable
from fpipe.spec.definition import Definition
from fpipe.spec.user_functions import Returns, Taken
from fpipe.torch_internals import beneath_forward_mode


def derivative(
    name: str, definition: Definition, along: tuple[str, ...], *, gauss_newton: bool = False
) -> Definition:
    """The definition of a pipeline of dual stages.

    Args:
        name: of the transform, for messages.
        definition: of the pipeline whose derivative is taken.
        along: the arguments that may move, ``"params"`` and ``"batch"``. The result takes a vector
            for each of them after the batch, None for one that stays.
        gauss_newton: cut the second derivative of the stages off.

    Returns:
        A definition whose losses come with their derivatives, and whose gradients are those by the
        arguments and by the vectors.

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
    batch_moves = "batch" in along

    def dual(function: Callable[..., Any], first: bool) -> Callable[..., Any]:
        return _dual_stage(function, first=first, batch_moves=batch_moves, cut_off=gauss_newton)

    loss_form = _LossForm(definition.returns, definition.loss_shape, definition.function)
    if gauss_newton:
        loss = _gauss_newton_loss(definition.loss, loss_form)
    else:
        loss = _dual_loss(definition.loss, loss_form, batch_moves=batch_moves)
    return replace(
        definition,
        stages=each_stage(definition.stages, dual),
        loss=loss,
        in_dims=(definition.in_dims,) * 2 if batch_moves else definition.in_dims,
        loss_shape=(*definition.loss_shape, 2),
        loss_cotangent=(0.0, 1.0),
        convention=DualArguments(
            definition.convention,
            Parts.of(definition),
            definition.trainable,
            along,
            weighable=not gauss_newton,
            is_partial=definition.group is not None,
        ).convention,
        # A stage's parameters come before their direction.
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


def load_rules() -> None:
    """Let torch load its forward-mode rules now: it warns of its own code when it does so."""
    with warnings.catch_warnings(), beneath_forward_mode():
        for kind in (DeprecationWarning, FutureWarning):  # the latter from torch 2.14 on
            warnings.simplefilter("ignore", kind)
        zero = torch.zeros((), device="cpu")
        jvp(torch.sin, (zero,), (zero,))


# ── stages ──────────────────────────────────────────────────────────────────────────────────────


def _dual_stage(
    function: Callable[..., Any], *, first: bool, batch_moves: bool, cut_off: bool
) -> Callable[..., Any]:
    """The dual of a stage function.

    Args:
        function: ``(params, x)`` or ``(params, x, microbatch)`` to ``y``.
        first: whether it is the first stage's, whose input is the microbatch.
        batch_moves: whether a microbatch comes with its direction.
        cut_off: cut the derivative off from parameters and inputs.
    """

    @wraps(function)
    def stage(packed: Any, value: Any, *microbatch: Any, **key: Tensor) -> Any:
        inputs = [value if batch_moves or not first else (value, None)]
        inputs += [pair if batch_moves else (pair, None) for pair in microbatch]
        arguments, directions = zip(packed, *inputs, strict=True)

        def run(*values: Any) -> Any:
            return function(*values, **key)

        with differentiable_twice():
            if not cut_off:
                return _push_forward(run, arguments, directions)
            y = run(*arguments)
            constants = pytree.tree_map(torch.Tensor.detach, arguments)
            return y, _push_forward(run, constants, directions)[1]

    return stage


def _push_forward(
    function: Callable[..., Any], arguments: tuple[Any, ...], directions: tuple[Any, ...]
) -> tuple[Any, Any]:
    """The output of `function`, and its derivative, which has None for leaves without one.

    Directions have None for a leaf that has none, or for a whole argument.
    """
    leaves, spec = pytree.flatten(arguments)
    aligned = [d for pair in zip(arguments, directions, strict=True) for d in _aligned(*pair)]
    moving = [index for index, direction in enumerate(aligned) if direction is not None]
    tangents = tuple(direction for direction in aligned if direction is not None)
    out_spec: Any = None
    is_smooth: list[bool] = []

    def flat(*values: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        nonlocal out_spec
        outputs, out_spec = pytree.flatten(
            function(*pytree.unflatten(spec, _with_values(leaves, moving, values)))
        )
        is_smooth[:] = [is_differentiable(leaf) for leaf in outputs]
        smooth = [leaf for leaf in outputs if is_differentiable(leaf)]
        return smooth, [leaf for leaf in outputs if not is_differentiable(leaf)]

    if moving:
        primals = tuple(leaves[index] for index in moving)
        pushed: Any = jvp(flat, primals, tangents, has_aux=True)
        smooth, derivatives, others = pushed
    else:
        smooth, others = flat()
        derivatives = [torch.zeros_like(leaf) for leaf in smooth]
    leaves_by_kind = {True: iter(smooth), False: iter(others)}
    outputs = [next(leaves_by_kind[flag]) for flag in is_smooth]
    remaining = iter(derivatives)
    tangent = [next(remaining) if flag else None for flag in is_smooth]
    return pytree.unflatten(out_spec, outputs), pytree.unflatten(out_spec, tangent)


def _aligned(value: Any, direction: Any) -> list[Tensor | None]:
    """The direction of each leaf, None for one that has none."""
    leaves = pytree.flatten_prefix(value)
    tangents = [None] * len(leaves) if direction is None else pytree.flatten_prefix(direction)
    return [d for leaf, d in zip(leaves, tangents, strict=True) if leaf is not None]


def _with_values(
    leaves: Sequence[Tensor], places: Sequence[int], values: Sequence[Tensor]
) -> list[Tensor]:
    """The leaves, with values in place of those at `places`."""
    replaced = list(leaves)
    for place, value in zip(places, values, strict=True):
        replaced[place] = value
    return replaced


# ── losses ──────────────────────────────────────────────────────────────────────────────────────


class _LossForm(NamedTuple):
    """The form of what a loss function returns.

    Attributes:
        returns: what it declares.
        shape: of its loss, with None for a size that the arguments tell.
        whole: it is one function of the whole model, and not of an output.
    """

    returns: Returns
    shape: tuple[int | None, ...]
    whole: bool

    def take(self, function: Callable[..., Any], *arguments: Any, **key: Tensor) -> Taken:
        """Call the function, and take its results apart."""
        subject, call = "the loss is", "loss(y, microbatch)"
        if self.whole:
            subject, call = f"{label_of(function)} returns", self.returns.call
        return self.returns.take(subject, call, function(*arguments, **key), self.shape)

    def paired(self, taken: Taken, derivative: Tensor) -> Any:
        """The results of the function, with the derivative beside the loss in a last dimension."""
        pair = torch.stack([taken.heads[0], derivative], -1)
        return self.returns.written(taken._replace(heads=(pair, *taken.heads[1:])))


def _dual_loss(
    function: Callable[..., Any], form: _LossForm, *, batch_moves: bool
) -> Callable[..., Any]:
    """The loss, and its directional derivative, along a new last dimension.

    It is taken as a first stage: of an output in place of parameters, or, where it is the whole
    model, as one that returns the loss already.
    """
    take = partial(form.take, function)
    dual = _dual_stage(take, first=True, batch_moves=batch_moves, cut_off=False)

    @wraps(function)
    def loss(packed: Any, microbatch: Any, **key: Tensor) -> Any:
        taken, derivatives = dual(packed, microbatch, **key)
        return form.paired(taken, derivatives.heads[0])

    return loss


def _gauss_newton_loss(
    function: Callable[[Any, Any], Any], form: _LossForm
) -> Callable[[Any, Any], Any]:
    """The results of `_dual_loss`, with another gradient by y: Hẏ, H the second derivative by y.

    The gradient by ẏ is the gradient of the loss.
    """

    @wraps(function)
    def loss(value: Any, microbatch: Any) -> Any:
        y, y_dot = value
        leaves, spec = pytree.flatten(y)
        smooth = [index for index, leaf in enumerate(leaves) if is_differentiable(leaf)]
        point = tuple(leaves[index] for index in smooth)
        tangents = tuple(pytree.flatten(y_dot)[0])

        def take(*values: Tensor) -> Taken:
            output = pytree.unflatten(spec, _with_values(leaves, smooth, values))
            return form.take(function, output, microbatch)

        with differentiable_twice():
            constants = tuple(leaf.detach() for leaf in point)
            pushed: Any = jvp(
                grad(lambda *values: take(*values).heads[0], tuple(range(len(constants)))),
                constants,
                tuple(t.detach() for t in tangents),
            )
            slopes, products = pushed
            derivative = _dot(slopes, tangents)
            # It adds nothing to the value, and the product to the gradient by y.
            curvature = _dot(products, point)
            return form.paired(take(*point), derivative + curvature - curvature.detach())

    return loss


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """The real inner product of two lists of tensors."""
    products = [(a.conj() * b).sum().real for a, b in zip(left, right, strict=True)]
    return torch.stack(products).sum()
