"""A call of a pipeline as one operation of torch: what autograd and `torch.func` see of it.

The operation takes the flat tensors of the arguments and returns those of the result. Mapped by
`torch.func.vmap` it is the same call of the pipeline of all members, so what runs is always a plan,
traced and compiled as any other. A call whose gradients are among its results can be differentiated
once: its backward scales them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import optree
import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from fpipe import tree
from fpipe.convention import scaled
from fpipe.definition import Definition
from fpipe.errors import FpipeError
from fpipe.transforms.ensemble import ensemble

INSTEAD: Final = {
    "Vmap": "torch.func.vmap over processes: fpipe.vmap(pipe) is the pipeline of all members, on "
    "every rank",
    "Grad": "torch.func.grad or vjp: pipe.step returns the gradients already, pipe.value can be "
    "differentiated by parameters and batch, and fpipe.hvp(pipe) gives second derivatives",
    "Jvp": "torch.func.jvp or jacfwd, or forward-mode autograd: fpipe.jvp(pipe) is the pipeline of "
    "the derivatives, and fpipe.hvp(pipe) that of second ones",
    "Functionalize": "torch.func.functionalize: a step is pure already, call it outside",
}


class Callee(Protocol):
    """What a pipeline is to this module.

    Attributes:
        definition: all that it was made from.
        rank: as in `Pipeline`.
        derived: pipelines that calls of this one need, by what makes them differ.
    """

    definition: Definition
    rank: int | None
    derived: dict[Any, Any]

    def __init__(self, definition: Definition) -> None: ...


def refuse(kind: str) -> FpipeError:
    """Why a pipeline cannot run within a transform of `torch.func`, and what to use instead."""
    text = INSTEAD.get(kind, "a transform of torch.func: call it outside")
    return FpipeError(f"a pipeline cannot run inside {text}")


@dataclass
class Call:
    """A method of a pipeline, of flat tensors.

    Attributes:
        pipe: the pipeline.
        method: the name of the method.
        spec: the structure of its arguments.
        options: further arguments by name, which are the same for all members.
        tracked: the method is ``run_step``, and the loss may be differentiated.
        made: the structure of the result, from when it has run.
        device: the default one where the call is made; within an operation torch forgets it.
    """

    pipe: Any
    method: str
    spec: optree.PyTreeSpec
    options: dict[str, Any] = field(default_factory=dict)
    tracked: bool = False
    made: optree.PyTreeSpec | None = None
    device: torch.device = field(default_factory=torch.get_default_device)

    def enter(self, leaves: Sequence[Tensor]) -> Any:
        """Make the call as an operation; returns what the method does."""
        outputs = _Operation.apply(self, *leaves)
        return self.result(outputs)

    def result(self, outputs: Sequence[Any]) -> Any:
        """The result whose leaves are `outputs`."""
        assert self.made is not None
        return tree.unflatten(self.made, outputs)

    def run(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Make the call where autograd and `torch.func` do not look."""
        arguments = tree.unflatten(self.spec, leaves)
        with nullcontext() if self.device.type == "cpu" else self.device:
            made = getattr(self.pipe, self.method)(*arguments, **self.options)
        outputs, self.made = tree.flatten(made)
        return tuple(outputs)

    def weighed(self, cotangent: Tensor, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradient by each leaf of the arguments, of the losses weighed by `cotangent`."""
        definition: Definition = self.pipe.definition
        _, found, *_ = self.result([cotangent, *grads])
        by_name = dict(zip(definition.wanted, found, strict=True))
        arguments = tree.unflatten(self.spec, range(self.spec.num_leaves))
        leaves: list[Tensor | None] = []
        for name, argument in zip(("params", "batch"), arguments, strict=True):
            weigh = definition.convention.weigh if name == "params" else scaled
            assert weigh is not None
            own = weigh(by_name[name], cotangent) if name in by_name else None
            # Parts of other processes have no gradient here.
            leaves += tree.broadcast_prefix("grads", own, argument, name)
        return leaves

    def of_members(
        self, leaves: Sequence[Tensor], dims: Sequence[int | None], size: int, randomness: str
    ) -> tuple[Call, list[Tensor]]:
        """This call for all members, and its leaves.

        Args:
            leaves: stacked along `dims`.
            dims: of each leaf the dimension of the members, None where they share it.
            size: how many there are.
            randomness: as in `torch.func.vmap`.

        Returns:
            A call whose results have the members in front.
        """
        if self.pipe.rank is not None:
            raise refuse("Vmap")
        own = "batch" in self.pipe.definition.wanted
        # Leaves of the batch get a gradient each, not the sum over the members who share them.
        first = self.spec.child(0).num_leaves if own else self.spec.num_leaves
        stacked = [
            leaf.movedim(dim, 0)
            if dim is not None
            else leaf.expand(size, *leaf.shape)
            if index >= first
            else leaf
            for index, (leaf, dim) in enumerate(zip(leaves, dims, strict=True))
        ]
        mapped = tuple(
            None if dim is None and index < first else 0 for index, dim in enumerate(dims)
        )
        key = (mapped, self.spec, randomness)
        derived = self.pipe.derived
        if key not in derived:
            in_dims = tree.unflatten(self.spec, mapped)
            derived[key] = _ensemble_of(self.pipe, in_dims, randomness)
        return replace(self, pipe=derived[key]), stacked


def choosing(pipe: Callee, names: tuple[str, ...]) -> Any:
    """The pipeline whose gradients are those by the arguments that `names` has, as a tuple."""
    if names not in pipe.derived:
        pipe.derived[names] = type(pipe)(replace(pipe.definition, argnums=names))
    return pipe.derived[names]


def _ensemble_of(pipe: Callee, in_dims: tuple[Any, ...], randomness: str) -> Any:
    # What is differentiated by is chosen last.
    chosen = pipe.definition.argnums
    made = ensemble(replace(pipe.definition, argnums="params"), in_dims, randomness)
    return type(pipe)(replace(made, argnums=chosen))


class _Operation(torch.autograd.Function):
    """The operation; of a tracked call's results only the loss may be differentiated."""

    @staticmethod
    def forward(call: Call, *leaves: Tensor) -> tuple[Tensor, ...]:
        return call.run(leaves)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call = inputs[0]
        ctx.set_materialize_grads(False)
        if ctx.call.tracked:
            ctx.save_for_backward(*output[1:])

    @staticmethod
    @_disable_dynamo
    def backward(ctx: Any, cotangent: Tensor | None, *further: Tensor | None) -> Any:
        if not ctx.call.tracked:
            raise refuse("Grad")
        # The gradients are outputs so that a second derivative arrives here, and is not lost.
        if any(own is not None for own in further):
            raise FpipeError(
                "pipe.value was differentiated twice, but its backward only scales gradients that "
                "are already there: fpipe.hvp(pipe) gives products with the second derivative"
            )
        if cotangent is None:
            return None, *(None for _ in range(ctx.call.spec.num_leaves))
        return None, *ctx.call.weighed(cotangent, ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: Call, *leaves: Tensor) -> Any:
        whole, stacked = call.of_members(leaves, in_dims[1:], info.batch_size, info.randomness)
        # Below this level there may be others, for which a tracked call is an operation again.
        outputs = _Operation.apply(whole, *stacked) if call.tracked else whole.run(stacked)
        call.made = whole.made
        return outputs, tuple(0 for _ in outputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise refuse("Jvp")
