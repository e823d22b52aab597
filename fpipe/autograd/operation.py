"""A call of a pipeline as one operation of torch, for autograd and `torch.func`.

The operation takes the flat tensors of the arguments and returns the flat tensors of the result.
Mapped by `torch.func.vmap` it is the same call of the pipeline of all members; differentiated it is
a call of a derived pipeline. So every call runs a plan, traced and compiled as any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final

import optree
import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from fpipe import pytree
from fpipe.autograd.derived_pipelines import Callee, Method, ensemble_of
from fpipe.autograd.rules import pull_back, push_forward
from fpipe.errors import FpipeError
from fpipe.inputs.ambient import autocasts, cast_as
from fpipe.random.torch_draws import generators

_INSTEAD: Final = {
    "Vmap": "torch.func.vmap over processes: fpipe.vmap(pipe) is the pipeline of all members, on "
    "every rank",
    "Grad": "torch.func.grad or vjp here: they know pipe.value, and in one process pipe.step, of "
    "pipelines without a state; fpipe.vjp(pipe) gives derivatives of what comes out of "
    "pipe.forward, and fpipe.hvp(pipe) second ones over processes too",
    "Jvp": "torch.func.jvp or jacfwd, or forward-mode autograd, here: they know pipe.value and "
    "pipe.step in one process, of pipelines without a state; fpipe.jvp(pipe) gives derivatives "
    "over processes too, and those of outputs",
    "Functionalize": "torch.func.functionalize: a step is pure already, call it outside",
}


def refusal(kind: str) -> FpipeError:
    """Why a pipeline cannot run within a transform of this kind, and what to use instead."""
    text = _INSTEAD.get(kind, "a transform of torch.func: call it outside")
    return FpipeError(f"a pipeline cannot run inside {text}")


@dataclass
class Call:
    """A method of a pipeline, of flat tensors.

    Attributes:
        pipe: the pipeline.
        method: the name of the method.
        spec: the structure of its arguments.
        options: further arguments by name, which are the same for all members.
        differentiable: the method is ``run_value`` or ``run_step``, and the operation has
            derivatives; otherwise the method itself takes care of them.
        repeats: the call may run again for a derivative.
        out_spec: the structure of the result, once it has run.
        drew: whether it drew from torch's generator, once it has run.
        device: the default device where the call is made; within an operation torch forgets it.
        autocast: the autocast where the call is made, which a derivative is outside of.
    """

    pipe: Callee
    method: Method
    spec: optree.PyTreeSpec
    options: dict[str, Any] = field(default_factory=dict)
    differentiable: bool = False
    repeats: bool = False
    out_spec: optree.PyTreeSpec | None = None
    drew: bool = False
    device: torch.device = field(default_factory=torch.get_default_device)
    autocast: tuple[tuple[str, bool, torch.dtype], ...] = field(default_factory=autocasts)

    @property
    def places(self) -> Any:
        """The arguments with the number of each leaf, counted over all of them, in its place."""
        return pytree.unflatten(self.spec, range(self.spec.num_leaves))

    def enter(self, leaves: Sequence[Tensor]) -> Any:
        """Make the call as an operation, and return the result of the method."""
        return self.result(_Operation.apply(self, *leaves))

    def result(self, outputs: Sequence[Any]) -> Any:
        """The result whose leaves are `outputs`."""
        assert self.out_spec is not None
        return pytree.unflatten(self.out_spec, outputs)

    def run(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Make the call beneath autograd and `torch.func`."""
        arguments = pytree.unflatten(self.spec, leaves)
        runs_again = self.differentiable or self.repeats
        before = _drawn_from(leaves) if runs_again else []
        with self.as_made():
            result = getattr(self.pipe, self.method)(*arguments, **self.options)
        if self.differentiable and self.method == "run_step":
            loss, grads, *aux = result
            result = (loss, self.pipe.definition.wrap(grads), *aux)  # grads as a tuple
        after = _drawn_from(leaves) if runs_again else []
        # Other threads may have drawn.
        self.drew = not all(map(torch.equal, before, after)) and self.pipe.stage_compiler.may_draw
        outputs, self.out_spec = pytree.flatten(result)
        return tuple(outputs)

    @contextmanager
    def as_made(self) -> Iterator[None]:
        """Within it the default device and autocast are those where the call was made."""
        with nullcontext() if self.device.type == "cpu" else self.device, cast_as(self.autocast):
            yield

    def another(
        self,
        pipe: Callee,
        method: Method,
        spec: optree.PyTreeSpec,
        out_spec: optree.PyTreeSpec | None = None,
    ) -> Call:
        """Another call with the same options; it can be differentiated as this one can."""
        return replace(self, pipe=pipe, method=method, spec=spec, out_spec=out_spec)

    def of_members(
        self, leaves: Sequence[Tensor], dims: Sequence[int | None], size: int, randomness: str
    ) -> tuple[Call, list[Tensor]]:
        """This call for all members, and its leaves.

        Args:
            leaves: stacked along `dims`.
            dims: for each leaf the dimension of the members, None if they share it.
            size: the number of members.
            randomness: as in `torch.func.vmap`.

        Returns:
            A call whose results have the members in front.
        """
        if self.pipe.rank is not None:
            raise refusal("Vmap")
        shared = {index for index, dim in enumerate(dims) if dim is None}
        if "batch" in self.pipe.definition.wanted:
            # Its leaves get a gradient each, not the sum over the members who share them.
            shared -= set(range(self.spec.child(0).num_leaves, len(leaves)))
        for column in _columns(self.spec):
            if not shared.issuperset(column):  # microbatches are stacked alike
                shared.difference_update(column)
        stacked = [
            leaf.movedim(dim, 0)
            if dim is not None
            else leaf
            if index in shared
            else leaf.expand(size, *leaf.shape)
            for index, (leaf, dim) in enumerate(zip(leaves, dims, strict=True))
        ]
        mapped = tuple(None if index in shared else 0 for index in range(len(leaves)))
        in_dims, key = pytree.unflatten(self.spec, mapped), (mapped, self.spec, randomness)
        return replace(self, pipe=ensemble_of(self.pipe, in_dims, randomness, key)), stacked


def _columns(spec: optree.PyTreeSpec) -> list[tuple[int, ...]]:
    """For each leaf of a microbatch of `fpipe.Microbatches`, its places in all microbatches."""
    columns: list[tuple[int, ...]] = []
    first = 0
    for argument in spec.children():
        parts = pytree.number_of_parts(pytree.unflatten(argument, range(argument.num_leaves)))
        if parts is not None:
            columns_here = zip(*pytree.places_of_parts(argument, parts), strict=False)
            columns += [tuple(first + place for place in column) for column in columns_here]
        first += argument.num_leaves
    return columns


def _drawn_from(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The states of the generators that a step on these tensors may draw from."""
    devices = (leaf.device for leaf in leaves if isinstance(leaf, Tensor))
    return [generator.get_state() for generator in generators(devices)]


class _Operation(torch.autograd.Function):
    """The operation; one that is not differentiable refuses when a derivative is taken."""

    @staticmethod
    def forward(call: Call, *leaves: Tensor) -> tuple[Tensor, ...]:
        return call.run(leaves)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call = call = inputs[0]
        ctx.set_materialize_grads(False)
        if call.differentiable:
            if call.method == "run_step":
                ctx.mark_non_differentiable(*pytree.flatten(call.result(output)[2:])[0])
            # A second derivative reads the gradients, and compares losses with those of its run.
            ctx.save_for_backward(*inputs[1:], *output)
            ctx.save_for_forward(*inputs[1:])

    @staticmethod
    @_disable_dynamo
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        call: Call = ctx.call
        count = call.spec.num_leaves
        if not call.differentiable:
            raise refusal("Grad")
        if all(cotangent is None for cotangent in cotangents):
            return None, *(None for _ in range(count))
        saved = ctx.saved_tensors  # torch.utils.checkpoint hands them out once
        leaves, outputs = saved[:count], saved[count:]
        return None, *pull_back(call, leaves, outputs, cotangents, ctx.needs_input_grad[1:])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: Call, *leaves: Tensor) -> Any:
        whole, stacked = call.of_members(leaves, in_dims[1:], info.batch_size, info.randomness)
        # Below this level there may be others, for which such a call is an operation again.
        outputs = _Operation.apply(whole, *stacked) if call.differentiable else whole.run(stacked)
        call.out_spec, call.drew = whole.out_spec, whole.drew
        return outputs, tuple(0 for _ in outputs)

    @staticmethod
    @_disable_dynamo
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> Any:
        if not ctx.call.differentiable:
            raise refusal("Jvp")
        return tuple(push_forward(ctx.call, ctx.saved_tensors, tangents))
