"""Losses, gradients and outputs of a pipeline, with an autograd history.

    call                backward
    value, step         weighs the gradients of a step, which the forward has run
    forward             runs ``vjp(pipe).step`` on the caller's cotangent:

    arguments ── forward only ──► outputs ┄┄ the caller's loss ┄┄┐
    gradients ◄── vjp(pipe).step ── cotangent ◄┄┄ autograd ┄┄┄┄┄┄┘

A result that can have no history says so when a derivative is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.autograd.derived_pipelines import Callee, vjp_of, with_argnums
from fpipe.autograd.operation import Call
from fpipe.autograd.rules import check_same_outputs, refuse_redrawing
from fpipe.errors import BatchError, FpipeError, StageError
from fpipe.execute.header import HISTORY
from fpipe.inputs.signature import is_differentiable
from fpipe.spec.convention import scaled
from fpipe.spec.definition import ARGUMENTS
from fpipe.torch_internals import functorch

BY_PARAMETERS: Final = (
    "over processes the loss of pipe.value has a derivative by the parameters alone, and that of a "
    "pipeline that fpipe.grad makes only if its argnums have them: detach what else requires a "
    'gradient; fpipe.grad(pipe, "batch").step returns gradients by the batch'
)
ON_ONE_RANK: Final = (
    "pipe.forward over processes has no derivative, for what comes out lies on one rank: "
    "fpipe.vjp(pipe).step takes its cotangent, on every rank"
)
TWICE: Final = (
    "what pipe.forward put out was differentiated twice: it can be once; compute the loss within "
    "the pipeline, whose pipe.value can be differentiated twice (of one function that is the loss "
    "function, of stages and modules their loss=)"
)
SEVERAL: Final = (
    "what pipe.forward put out was differentiated for several cotangents at once "
    "(is_grads_batched, vectorize): take them one after the other, or fpipe.jvp(pipe), whose "
    "forward gives derivatives of outputs in a direction"
)
NO_LOSS: Final = (
    "pipe.value has no derivative of a pipeline with a state, or of one that returns norms or "
    "takes a cotangent: pipe.step returns gradients, and pipe.forward has a history"
)
OF_DUALS: Final = (
    "forward of fpipe.jvp(pipe) and fpipe.hvp(pipe) has no derivative: differentiate pipe.forward, "
    "or pipe.value within torch.func.jvp"
)


def is_tracked(leaves: Sequence[Any]) -> bool:
    """Whether autograd or `torch.func.grad` records what is computed of any of `leaves`."""
    return torch.is_grad_enabled() and any(
        isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves
    )


def has_history(pipe: Callee) -> bool:
    """Whether the pipeline's loss, or losses, can be differentiated."""
    return pipe.definition.convention.weigh is not None


def without_history(values: Any, leaves: Sequence[Any], why: str) -> Any:
    """A tree of tensors whose derivative by `leaves` is refused, and why, when it is taken."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return pytree.tree_map(lambda value: _Refused.apply(why, value, *tensors), values)


# ── losses and gradients ────────────────────────────────────────────────────────────────────────


def tracked_value(pipe: Callee, *arguments: Any, **options: Any) -> Any:
    """The loss, or losses, with history; arguments and options are those of `Engine.run_value`.

    Raises:
        BatchError: it is to be differentiated by a batch that several losses share.
    """
    return tracked_step(pipe, (), *arguments, **options)[0]


def tracked_step(
    pipe: Callee, wanted: tuple[str, ...], *arguments: Any, **options: Any
) -> tuple[Any, ...]:
    """The loss and the gradients by the arguments `wanted`, with history.

    Other arguments are those of `Engine.run_step`.

    Returns:
        ``(loss, grads)``, the gradients as a tuple, and aux if there is any.
    """
    leaves, spec = pytree.flatten(arguments)
    definition = pipe.definition
    tracked = {
        name
        for name, argument in zip(definition.along, arguments, strict=True)
        if is_tracked(pytree.flatten(argument)[0])
    }
    if pipe.rank is not None and not tracked <= {"params"} & {*definition.wanted}:
        value = pipe.run_value(*arguments, **options)
        return without_history(value, leaves, BY_PARAMETERS), ()
    has_several = bool(definition.loss_shape[bool(definition.convention.vectors) :])
    if "batch" in tracked and has_several and definition.alone is None:
        raise BatchError(
            "a leaf of the batch requires a gradient, but the losses of single examples, and a "
            "derivative of an ensemble, can be differentiated by the parameters alone: detach the "
            "leaf; torch.func.vmap of torch.func.grad of pipe.value gives gradients by the batch "
            "of each member, and fpipe.vmap(fpipe.jvp(pipe)) can be differentiated by it"
        )
    if has_several:
        tracked.discard("batch")  # its gradients will be needed member by member
    names = tuple(name for name in ARGUMENTS if name in tracked or name in wanted)
    if names and pipe.rank is not None:
        # Another pipeline would be counted, which ranks that want no gradient do not make.
        names = definition.wanted
    if not names:
        value = Call(pipe, "run_value", spec, options, differentiable=True)
        return value.enter(leaves), ()
    if not wanted and pipe.rank is not None:
        options["name"] = HISTORY
    call = Call(with_argnums(pipe, names), "run_step", spec, options, differentiable=True)
    loss, grads, *aux = call.enter(leaves)
    grads_by_name = dict(zip(names, grads, strict=True))
    return loss, tuple(grads_by_name[name] for name in wanted), *aux


# ── outputs ─────────────────────────────────────────────────────────────────────────────────────


def tracked_forward(pipe: Callee, *arguments: Any, key: Tensor | None, out_dims: Any) -> Any:
    """The result of `Engine.run_forward`, with history; if it can have none, a backward says so."""
    leaves, spec = pytree.flatten(arguments)
    if pipe.rank is not None:
        outputs = pipe.run_forward(*arguments, key=key, out_dims=out_dims)
        return without_history(outputs, leaves, ON_ONE_RANK)
    call = Call(pipe, "run_forward", spec, {"key": key, "out_dims": out_dims}, repeats=True)
    return call.result(_ForwardOperation.apply(call, key, *leaves))


def _pull_back(
    call: Call,
    key: Tensor | None,
    leaves: Sequence[Tensor],
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients by the leaves that need one, of a call of ``forward``."""
    refuse_redrawing(call)
    definition = call.pipe.definition
    arguments, needs = pytree.unflatten(call.spec, leaves), pytree.unflatten(call.spec, needed)
    place_of = {name: definition.takes.index(name) for name in ARGUMENTS}
    names = tuple(name for name in ARGUMENTS if any(pytree.flatten(needs[place_of[name]])[0]))
    gradients: list[Tensor | None] = [None] * len(leaves)
    with call.as_made():
        for grads in _terms(call, arguments, key, outputs, cotangents, names):
            for name, tree in grads.items():
                numbers = pytree.flatten(call.places[place_of[name]])[0]
                values = pytree.broadcast_prefix("grads", tree, arguments[place_of[name]], name)
                for number, value in zip(numbers, values, strict=True):
                    if value is not None and needed[number]:
                        before = gradients[number]
                        gradients[number] = value if before is None else before + value
    return gradients


def _terms(
    call: Call,
    arguments: Sequence[Any],
    key: Tensor | None,
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    names: tuple[str, ...],
) -> Iterator[dict[str, Any]]:
    """The gradients of the outputs; of one function those of its loss too."""
    cotangent = call.result(_filled(call, outputs, cotangents))
    if call.pipe.definition.function:
        weight, cotangent = cotangent
        if weight is not None:
            value, grads = _step(with_argnums(call.pipe, names), arguments, key)
            check_same_outputs(value, [(torch.ones_like(outputs[0]), outputs[0])])
            yield {name: scaled(tree, weight) for name, tree in grads.items()}
        outputs, cotangents = outputs[1:], cotangents[1:]
    if any(leaf is not None for leaf in pytree.flatten_prefix(cotangent)):
        try:
            pipe = with_argnums(vjp_of(call.pipe, call.options["out_dims"]), names)
        except StageError as error:
            raise FpipeError(f"pipe.forward has no derivative here: {error}") from error
        product, grads = _step(pipe, (*arguments, cotangent), key)
        pairs = zip(cotangents, outputs, strict=True)
        check_same_outputs(product, [(c, y) for c, y in pairs if c is not None])
        yield grads


def _filled(
    call: Call, outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The cotangents; parts of `fpipe.Microbatches` have zeros if any of them has numbers."""
    places = call.result(range(len(outputs)))
    in_parts = set(range(len(outputs))) - set(pytree.places_of_rest(pytree.structure(places)))
    if all(cotangents[place] is None for place in in_parts):
        return list(cotangents)
    return [
        torch.zeros_like(output)
        if cotangent is None and place in in_parts and is_differentiable(output)
        else cotangent
        for place, (output, cotangent) in enumerate(zip(outputs, cotangents, strict=True))
    ]


def _step(
    pipe: Callee, arguments: Sequence[Any], key: Tensor | None
) -> tuple[Tensor, dict[str, Any]]:
    """The loss of a step, and its gradients by the names of the arguments."""
    loss, grads, *_ = pipe.run_step(*arguments, key=key)
    definition = pipe.definition
    return loss, dict(zip(definition.wanted, definition.wrap(grads), strict=True))


class _ForwardOperation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, key: Tensor | None, *leaves: Tensor) -> tuple[Tensor, ...]:
        outputs = call.run(leaves)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(key, *leaves, *outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        needed = ctx.needs_input_grad[2:]
        key, *saved = ctx.saved_tensors
        leaves, outputs = saved[: len(needed)], saved[len(needed) :]
        tensors = (cotangent for cotangent in cotangents if cotangent is not None)
        if any(map(functorch.is_legacy_batchedtensor, tensors)):
            raise FpipeError(SEVERAL)
        with torch.no_grad():
            grads = _pull_back(ctx.call, key, leaves, outputs, cotangents, needed)
        if torch.is_grad_enabled():
            # A derivative by some leaves alone would not reach the refusal of once_differentiable.
            grads = without_history(grads, (*leaves, *cotangents), TWICE)
        return None, None, *grads


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, why: str, value: Tensor, *leaves: Tensor) -> Tensor:
        ctx.why = why
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise FpipeError(ctx.why)
