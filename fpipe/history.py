"""A pipeline inside a bigger computation: its loss with autograd history, and what to use instead.

The forward of the autograd node runs a whole step, whose gradients its backward scales. So the loss
can be differentiated once, by ``backward()`` and by `torch.func.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe.errors import FpipeError

Work = Callable[[Sequence[Tensor]], tuple[Tensor, Sequence[Tensor | None]]]
"""From parameter leaves to the loss and the gradient of each that has one."""

_INSTEAD = {
    "Vmap": "torch.func.vmap: fpipe.vmap(pipe) is the pipeline of all members",
    "Grad": "torch.func.grad or vjp: pipe.step returns the gradients already, pipe.value can be "
    "differentiated by the parameters, and fpipe.hvp(pipe) gives second derivatives",
    "Jvp": "torch.func.jvp or jacfwd: fpipe.jvp(pipe) is the pipeline of the derivatives",
    "Functionalize": "torch.func.functionalize: a step is pure already, call it outside",
}


def refuse_levels() -> None:
    """Refuse to run within a transform of `torch.func`.

    Raises:
        FpipeError: names the transform of ours to use instead.
    """
    level = torch._C._functorch.peek_interpreter_stack()
    if level is not None:
        text = _INSTEAD.get(level.key().name, "a transform of torch.func: call it outside")
        raise FpipeError(f"a pipeline cannot run inside {text}")


def is_tracked(leaves: Sequence[Any]) -> bool:
    """Whether autograd or `torch.func.grad` wants to know what becomes of any of `leaves`."""
    return torch.is_grad_enabled() and any(
        isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves
    )


def refuse_batch(leaves: Sequence[Any]) -> None:
    """Refuse to differentiate by leaves of the batch.

    Raises:
        FpipeError: names what gives such gradients.
    """
    if is_tracked(leaves):
        raise FpipeError(
            "pipe.value can be differentiated by the parameters, but here a leaf of the batch "
            "requires a gradient: detach it, or take the gradient by the batch from "
            'fpipe.grad(pipe, argnums="batch")'
        )


def tracked_loss(work: Work, leaves: Sequence[Tensor]) -> Tensor:
    """The loss that `work` computes, with history.

    Args:
        work: runs a step.
        leaves: the parameters.
    """
    loss: Tensor = _Loss.apply(_Noted(work), *leaves)[0]
    return loss


class _Noted:
    """Work that notes which leaves have a gradient."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.trained: list[bool] = []

    def __call__(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        loss, grads = self._work(leaves)
        self.trained = [gradient is not None for gradient in grads]
        return (loss, *(gradient for gradient in grads if gradient is not None))


class _Loss(torch.autograd.Function):
    """Loss and gradients; only the loss may be differentiated."""

    @staticmethod
    def forward(work: _Noted, *leaves: Tensor) -> tuple[Tensor, ...]:
        return work(leaves)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.work = inputs[0]
        ctx.save_for_backward(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None, *further: Tensor | None) -> Any:
        # The gradients are outputs so that a second derivative arrives here, and is not lost.
        if any(own is not None for own in further):
            raise FpipeError(
                "pipe.value was differentiated twice, but its backward only scales gradients that "
                "are already there: fpipe.hvp(pipe) gives products with the second derivative"
            )
        grads = iter(ctx.saved_tensors)
        found = [next(grads) if trained else None for trained in ctx.work.trained]
        if cotangent is None:
            return None, *(None for _ in found)
        return None, *(None if g is None else (cotangent * g).to(g.dtype) for g in found)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        raise FpipeError(f"a pipeline cannot run inside {_INSTEAD['Vmap']}")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise FpipeError(f"a pipeline cannot run inside {_INSTEAD['Jvp']}")
