"""What a pipeline puts out, with autograd history: its backward runs the pipeline once more.

arguments ── forward only ──► outputs ┄┄ the caller's loss ┄┄┐
gradients ◄── vjp(pipe).step ── cotangent ◄┄┄ autograd ┄┄┄┄┄┄┘
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.autograd.derived import Callee, choosing, pulled
from fpipe.autograd.operation import Call
from fpipe.autograd.rules import check_again, refuse_redrawing
from fpipe.convention import scaled
from fpipe.definition import ARGUMENTS
from fpipe.errors import FpipeError, StageError
from fpipe.inputs.signature import is_differentiable
from fpipe.torch_internals import functorch

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


def tracked_forward(pipe: Callee, *arguments: Any, key: Tensor | None, out_dims: Any) -> Any:
    """What ``forward`` returns, with history; where it can have none, a backward says why."""
    leaves, spec = pytree.flatten(arguments)
    if pipe.rank is not None:
        made = pipe.run_forward(*arguments, key=key, out_dims=out_dims)
        return without_history(made, leaves, ON_ONE_RANK)
    call = _Outputs(pipe, spec, key, out_dims)
    outputs = _Operation.apply(call, key, *leaves)
    return call.call.result(outputs)


def without_history(values: Any, leaves: Sequence[Any], why: str) -> Any:
    """A tree of tensors whose derivative by `leaves` is refused when it is taken, and says why."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return pytree.tree_map(lambda value: _Refused.apply(why, value, *tensors), values)


class _Outputs:
    """One call of ``forward``."""

    def __init__(self, pipe: Callee, spec: Any, key: Tensor | None, out_dims: Any) -> None:
        self._pipe, self._spec, self._out_dims = pipe, spec, out_dims
        options = {"key": key, "out_dims": out_dims}
        self.call = Call(pipe, "run_forward", spec, options, repeats=True)

    def run(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs."""
        return self.call.run(leaves)

    def pull(
        self,
        key: Tensor | None,
        leaves: Sequence[Tensor],
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        """The gradients by the leaves that need one."""
        refuse_redrawing(self.call)
        definition = self._pipe.definition
        arguments = pytree.unflatten(self._spec, leaves)
        wants = pytree.unflatten(self._spec, needed)
        at = {name: definition.takes.index(name) for name in ARGUMENTS}
        names = tuple(name for name in ARGUMENTS if any(pytree.flatten(wants[at[name]])[0]))
        found: list[Tensor | None] = [None] * len(leaves)
        places = pytree.unflatten(self._spec, range(len(leaves)))
        with self.call.as_made():
            for grads in self._gradients(arguments, key, outputs, cotangents, names):
                for name, own in grads.items():
                    numbers = pytree.flatten(places[at[name]])[0]
                    values = pytree.broadcast_prefix("grads", own, arguments[at[name]], name)
                    for number, value in zip(numbers, values, strict=True):
                        if value is not None and needed[number]:
                            before = found[number]
                            found[number] = value if before is None else before + value
        return found

    def _gradients(
        self,
        arguments: Sequence[Any],
        key: Tensor | None,
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
        names: tuple[str, ...],
    ) -> Iterator[dict[str, Any]]:
        """Those of the outputs; of one function those of its loss too."""
        made = self.call.result(self._filled(outputs, cotangents))
        if self._pipe.definition.function:
            weight, made = made
            if weight is not None:
                value, grads = _step(choosing(self._pipe, names), arguments, key)
                check_again(value, [(torch.ones_like(outputs[0]), outputs[0])])
                yield {name: scaled(own, weight) for name, own in grads.items()}
            outputs, cotangents = outputs[1:], cotangents[1:]
        if any(leaf is not None for leaf in pytree.flatten_prefix(made)):
            try:
                other = choosing(pulled(self._pipe, self._out_dims), names)
            except StageError as error:
                raise FpipeError(f"pipe.forward has no derivative here: {error}") from error
            product, grads = _step(other, (*arguments, made), key)
            pairs = zip(cotangents, outputs, strict=True)
            check_again(product, [(c, y) for c, y in pairs if c is not None])
            yield grads

    def _filled(
        self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The cotangents, with zeros for parts without one beside others: they go in alike."""
        made = self.call.result(range(len(outputs)))
        apart = set(range(len(outputs))) - set(pytree.places_of_rest(pytree.structure(made)))
        if all(cotangents[place] is None for place in apart):
            return list(cotangents)
        return [
            torch.zeros_like(output)
            if cotangent is None and place in apart and is_differentiable(output)
            else cotangent
            for place, (output, cotangent) in enumerate(zip(outputs, cotangents, strict=True))
        ]


def _step(
    pipe: Callee, arguments: Sequence[Any], key: Tensor | None
) -> tuple[Tensor, dict[str, Any]]:
    """The loss of a step, and the gradients by what they are by."""
    loss, grads, *_ = pipe.run_step(*arguments, key=key)
    definition = pipe.definition
    return loss, dict(zip(definition.wanted, definition.for_each(grads), strict=True))


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _Outputs, key: Tensor | None, *leaves: Tensor
    ) -> tuple[Tensor, ...]:
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
        given = (cotangent for cotangent in cotangents if cotangent is not None)
        if any(map(functorch.is_legacy_batchedtensor, given)):
            raise FpipeError(SEVERAL)
        with torch.no_grad():
            grads = ctx.call.pull(key, leaves, outputs, cotangents, needed)
        if torch.is_grad_enabled():
            # torch's own once_differentiable refuses where nobody looks who asks for the
            # derivative by some leaves alone.
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
