"""Derivatives of calls: each is a call again, of the same pipeline or of its dual stages.

    a call                     in reverse                             forward
    value(p, b)                the gradients of step, weighed         value(p, b, v), dual stages
    step(p, b)                 the same, and Hv, v the cotangents     step(p, b, v), dual stages
                               of its gradients
    value or step (p, b, v)    its own gradients, weighed             –

p are the parameters, b the batch, v the vectors along which stages are differentiated, and H the
second derivative of the loss by parameters and batch. So the loss can be differentiated twice, and
once of these forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import optree
import torch
from torch import Tensor

from fpipe import pytree
from fpipe.autograd.derived_pipelines import (
    Callee,
    Method,
    jvp_of,
    jvp_of_gradients,
    member_of,
    with_argnums,
)
from fpipe.errors import FpipeError
from fpipe.functional.ensemble import stacked_along
from fpipe.spec.convention import scaled
from fpipe.spec.definition import ARGUMENTS, Definition
from fpipe.torch_internals import functorch

Trees = dict[int, Any]
"""Gradients of the arguments of a call, by their places among them."""


class Differentiable(Protocol):
    """A call, as these rules see it: `fpipe.autograd.operation.Call` is one."""

    pipe: Callee
    method: Method
    spec: optree.PyTreeSpec
    drew: bool

    @property
    def places(self) -> Any:
        """The arguments with the number of each leaf in its place."""

    def enter(self, leaves: Sequence[Tensor]) -> Any:
        """Make the call."""

    def result(self, outputs: Sequence[Any]) -> Any:
        """The result whose leaves are `outputs`."""

    def another(
        self,
        pipe: Callee,
        method: Method,
        spec: optree.PyTreeSpec,
        out_spec: optree.PyTreeSpec | None = None,
    ) -> Self:
        """Another call with the same options; it can be differentiated as this one can."""


def pull_back(
    call: Differentiable,
    leaves: Sequence[Tensor],
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The gradient by each leaf of a call's arguments.

    Args:
        call: of ``run_value``, or of ``run_step`` with a tuple of gradients.
        leaves: of its arguments.
        outputs: leaves of the result; empty if they have not been kept.
        cotangents: of each leaf of the result, None for 0.
        needed: whether the gradient by each leaf is wanted.

    Raises:
        FpipeError: there is no such derivative, or it would draw other random numbers.
    """
    arguments = call.places
    definition = call.pipe.definition
    names = _needed_names(definition, arguments, needed)
    weights = call.result(cotangents)
    if call.method == "run_value":
        gradients = _by_another_step(call, leaves, outputs, weights, names)
    else:
        grads = dict(zip(definition.wanted, call.result(outputs)[1], strict=True))
        if definition.alone is not None:
            # It is the sum over members who share a leaf, but each has a weight of its own.
            grads.pop("batch", None)
        gradients = _weighted_sum(definition, arguments, grads, weights[0])
        # A level of torch.func within which the call was made did not ask for these.
        further = tuple(name for name in names if name not in grads)
        if further and pytree.flatten(weights[0])[0]:
            losses = pytree.flatten(call.result(outputs)[0])[0]
            gradients |= _by_another_step(call, leaves, losses, weights[0], further)
        places = dict(zip(definition.wanted, call.result(range(len(cotangents)))[1], strict=True))
        vectors = [_vector(places.get(name), cotangents, outputs) for name in ARGUMENTS]
        if any(vector is not None for vector in vectors):
            _add(gradients, _hessian_products(call, leaves, outputs[0], vectors, names))
    return [
        gradient
        for place, argument in enumerate(arguments)
        for gradient in pytree.broadcast_prefix(
            "grads", gradients.get(place), argument, "arguments"
        )
    ]


def push_forward(
    call: Differentiable, leaves: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The derivative of each leaf of a call's result, in the direction of `tangents`.

    Args:
        call: as for `pull_back`, as are `leaves`.
        tangents: the direction of each leaf of the arguments, None for 0.

    Raises:
        FpipeError: there is no such derivative, or it would draw other random numbers.
    """
    vectors = [_vector(argument, tangents, leaves) for argument in call.places]
    if call.method == "run_value":
        loss = _call_duals(call, jvp_of, leaves, vectors)
        return list(pytree.flatten(loss.tangent)[0])
    loss, duals, *aux = _call_duals(call, jvp_of, leaves, vectors, call.pipe.definition.wanted)
    derivatives = pytree.flatten((loss.tangent, [dual.primal for dual in duals]))[0]
    return [*derivatives, *(None for _ in pytree.flatten(aux)[0])]


def _needed_names(
    definition: Definition, arguments: Sequence[Any], needed: Sequence[bool]
) -> tuple[str, ...]:
    """The arguments by which, or by whose vectors, a gradient is wanted."""
    wanted = {
        name
        for name, argument in zip(definition.along, arguments, strict=True)
        if any(needed[place] for place in pytree.flatten(argument)[0])
    }
    return tuple(name for name in ARGUMENTS if name in wanted)


# ── gradients of the losses, weighed ────────────────────────────────────────────────────────────


def _by_another_step(
    call: Differentiable,
    leaves: Sequence[Tensor],
    losses: Sequence[Tensor],
    weights: Any,
    names: tuple[str, ...],
) -> Trees:
    """Weighed gradients of the losses by the arguments `names`, from another step."""
    definition = call.pipe.definition
    if call.pipe.rank is not None:
        raise FpipeError(
            f"a pipeline over processes was differentiated by {' and '.join(names)} when its step "
            "had ended without that: it can be differentiated by the parameters, of which the "
            "innermost torch.func.grad or vjp around it must know, or autograd outside of them"
        )
    if definition.alone is not None and "batch" in names:
        return _of_each_member(call, leaves, weights, names)
    refuse_redrawing(call)
    step = call.another(with_argnums(call.pipe, names), "run_step", call.spec)
    losses_again, grads, *_ = step.enter(leaves)
    _check_same_losses(losses_again, losses)
    grads_by_name = dict(zip(names, grads, strict=True))
    return _weighted_sum(definition, call.places, grads_by_name, weights)


def _of_each_member(
    call: Differentiable, leaves: Sequence[Tensor], weights: Any, names: tuple[str, ...]
) -> Trees:
    """As `_by_another_step`, for an ensemble: each member's own, summed where members share."""
    definition = call.pipe.definition
    assert definition.alone is not None
    named = list(zip(definition.along, call.places, strict=True))
    needed = [name in names for name, argument in named for _ in pytree.flatten(argument)[0]]
    dims = stacked_along(definition, pytree.unflatten(call.spec, leaves))
    cotangents, spec = pytree.flatten(weights)
    member_call = call.another(member_of(call.pipe), "run_value", call.spec, out_spec=spec)
    places: list[int] = []

    def of_member(*values: Tensor) -> list[Tensor]:
        grads = pull_back(member_call, values[: len(leaves)], (), values[len(leaves) :], needed)
        by_place = {place: grad for place, grad in enumerate(grads) if grad is not None}
        places[:] = by_place
        return list(by_place.values())

    in_dims = (*dims, *(0 for _ in cotangents))
    stacked = torch.vmap(of_member, in_dims=in_dims, randomness=definition.alone.randomness)(
        *leaves, *cotangents
    )
    grads: dict[int, Tensor] = {}
    for place, member_grads in zip(places, stacked, strict=True):
        dim = dims[place]
        grads[place] = member_grads.sum(0) if dim is None else member_grads.movedim(0, dim)
    return {
        at: pytree.tree_map(grads.get, argument)
        for at, (name, argument) in enumerate(named)
        if name in names
    }


def _weighted_sum(
    definition: Definition, arguments: Sequence[Any], grads: Mapping[str, Any], weights: Any
) -> Trees:
    """The gradients of the losses, each with its weight.

    Args:
        definition: of the pipeline.
        arguments: of the call; None in place of a vector that is missing.
        grads: by the names of the arguments; with vectors each is a dual.
        weights: of the losses; with vectors a dual of them. None for 0.
    """
    gradients: Trees = {}
    along = definition.convention.vectors
    for place, name in enumerate(ARGUMENTS):
        if name not in grads:
            continue
        weigh = definition.convention.weigh if name == "params" else scaled
        assert weigh is not None
        if not along:
            if weights is not None:
                gradients[place] = weigh(grads[name], weights)
            continue
        # The derivative's gradient by the vector is the gradient of the loss.
        by_argument, by_vector = grads[name]
        vector_place = len(ARGUMENTS) + along.index(name) if name in along else None
        has_vector = vector_place is not None and arguments[vector_place] is not None
        if weights.tangent is not None:
            gradients[place] = weigh(by_argument, weights.tangent)
            if vector_place is not None and has_vector:
                gradients[vector_place] = weigh(by_vector, weights.tangent)
        if weights.primal is not None:
            if not has_vector:
                raise FpipeError(
                    f"the loss that comes with a derivative was differentiated by {name}, which "
                    "has no direction there: differentiate the loss of pipe.value"
                )
            _add(gradients, {place: weigh(by_vector, weights.primal)})
    return gradients


def _add(gradients: Trees, more: Trees) -> None:
    for place, tree in more.items():
        before = gradients.get(place)
        gradients[place] = tree if before is None else pytree.tree_map(torch.add, before, tree)


# ── products and derivatives, from dual stages ──────────────────────────────────────────────────


def _hessian_products(
    call: Differentiable,
    leaves: Sequence[Tensor],
    loss: Tensor,
    vectors: Sequence[Any],
    names: tuple[str, ...],
) -> Trees:
    """The second derivative, applied to vectors in the structure of the gradients."""
    definition = call.pipe.definition
    if definition.sink.join is not None:
        raise FpipeError(
            "gradients of single examples were differentiated again, each in a direction of its "
            "own: torch.func.vmap of torch.func.grad of the value of the pipeline itself, over "
            "batches of one, can be"
        )
    losses_again, duals, *_ = _call_duals(call, jvp_of_gradients, leaves, vectors, names)
    _check_same_losses(losses_again.primal, [loss])
    products = dict(zip(names, (dual.primal for dual in duals), strict=True))
    if "params" in products and definition.loss_shape:
        # A leaf that members share has the sum over them.
        assert definition.convention.weigh is not None
        ones = torch.ones_like(loss)
        products["params"] = definition.convention.weigh(products["params"], ones)
    return {ARGUMENTS.index(name): product for name, product in products.items()}


def _call_duals(
    call: Differentiable,
    duals_of: Callable[[Callee], Callee],
    leaves: Sequence[Tensor],
    vectors: Sequence[Any],
    names: tuple[str, ...] = (),
) -> Any:
    """The call with dual stages: its step, with gradients by `names`; without any its value."""
    if call.pipe.definition.convention.vectors:
        raise FpipeError(
            "a pipeline was differentiated three times, or forward twice: its loss can be "
            "differentiated twice, and once of these forward, as torch.func.hessian does"
        )
    if call.pipe.rank is not None:
        raise FpipeError(
            "a pipeline over processes was differentiated twice, but one of its ranks cannot know "
            "whether the others were too: call fpipe.hvp(pipe) on every rank"
        )
    refuse_redrawing(call)
    flat, spec = pytree.flatten((*pytree.unflatten(call.spec, leaves), *vectors))
    pipe = duals_of(call.pipe)
    if names:
        return call.another(with_argnums(pipe, names), "run_step", spec).enter(flat)
    return call.another(pipe, "run_value", spec).enter(flat)


def _vector(places: Any, directions: Sequence[Tensor | None], like: Sequence[Tensor]) -> Any:
    """The directions at `places`, in their structure; None where nothing moves."""
    if all(directions[place] is None for place in pytree.flatten(places)[0]):
        return None

    def direction(place: int) -> Tensor:
        tensor = directions[place]
        return torch.zeros_like(like[place]) if tensor is None else tensor

    return pytree.tree_map(direction, places)


# ── runs for a derivative must compute what the first run did ───────────────────────────────────


def refuse_redrawing(call: Differentiable) -> None:
    """Refuse to run a call again that drew from torch's generator."""
    if call.drew:
        raise FpipeError(
            "a derivative of a pipeline runs it again, but its stages draw from torch's generator, "
            "and would draw other numbers: draw from a key, fpipe.Stage(fn, reads_key=True) or "
            "has_key=True"
        )


def _check_same_losses(losses_again: Any, losses: Sequence[Tensor]) -> None:
    """Refuse derivatives of other losses than those of the first run, if these have been kept."""
    if losses:
        total = sum(loss.sum() for loss in pytree.flatten(losses_again)[0])
        check_same_outputs(total, [(torch.ones_like(loss), loss) for loss in losses])


def check_same_outputs(product: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Refuse gradients if the second run computed other outputs than the first.

    Args:
        product: the sum of cotangents times outputs of the second run.
        pairs: the cotangent of each output, and the output of the first run.

    Raises:
        FpipeError: the product differs by more than rounding.
    """
    if functorch.peek_interpreter_stack() is not None or functorch.is_legacy_batchedtensor(product):
        return  # these are no numbers
    # A product of terms that cancel is as exact as its terms.
    expected, scale, eps = 0.0, 1.0, 0.0
    for cotangent, output in pairs:
        wide = torch.complex128 if output.is_complex() else torch.float64
        c, y = cotangent.to(wide).flatten(), output.to(wide).flatten()
        expected += torch.linalg.vecdot(c, y).real.item()
        scale += torch.linalg.vecdot(c.abs(), y.abs()).item()
        eps = max(eps, torch.finfo(output.dtype).eps)
    # The two runs have other kernels; a difference of infinities is NaN, which compares as equal.
    if abs(product.item() - expected) > eps**0.5 * scale:
        raise FpipeError(
            "the pipeline put out other numbers when it ran again, for the derivative of "
            "a call: until the backward, leave alone what its stages read beside their "
            "arguments, such as the mode of a module (train, eval), its buffers, tensors that they "
            "close over and Python's own values; and let them draw from a key"
        )
