"""Steps of an ensemble without a pipeline: what people write with `torch.func` and `torch.compile`.

stacked parameters, microbatch ── vmap(grad_and_value(loss)) ──► + ──► losses, gradients
                                 so far, of the microbatches before ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fpipe import pytree

Loss = Callable[[Any, Tensor], Tensor]


def _maybe_compiled(function: Callable[..., Any], compile: bool) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True) if compile else function


def whole_batch(loss: Loss, *, compile: bool) -> Callable[[Any, Tensor], Any]:
    """``(params, batch) -> (grads, losses)`` of all rows at once.

    Args:
        loss: of one member.
        compile: with Inductor.
    """
    step = _maybe_compiled(vmap(grad_and_value(loss), in_dims=(0, None)), compile)

    def run(params: Any, batch: Tensor) -> Any:
        # vmap would run the fused kernel of the CPU member by member.
        with sdpa_kernel(SDPBackend.MATH):
            return step(params, batch)

    return run


def accumulated(loss: Loss, microbatches: int, *, compile: bool) -> Callable[[Any, Tensor], Any]:
    """``(params, batch) -> (grads, losses)``, added up over microbatches, as memory asks for.

    Args:
        loss: of one member, a mean over rows.
        microbatches: of a batch.
        compile: with Inductor; sums are part of the compiled graph.
    """

    def share(params: Any, rows: Tensor) -> Tensor:
        return loss(params, rows) / microbatches

    gradients = vmap(grad_and_value(share), in_dims=(0, None))

    def further(params: Any, rows: Tensor, so_far: Any) -> Any:
        return pytree.tree_map(torch.add, so_far, gradients(params, rows))

    begin, go_on = _maybe_compiled(gradients, compile), _maybe_compiled(further, compile)

    def run(params: Any, batch: Tensor) -> Any:
        first, *others = batch.chunk(microbatches)
        with sdpa_kernel(SDPBackend.MATH):
            found = begin(params, first)
            for rows in others:
                found = go_on(params, rows, found)
        return found

    return run


def trained(
    gradients: Callable[[Any, Tensor], Any], params: Any, **hyper: Any
) -> Callable[[Tensor], Tensor]:
    """``batch -> losses`` of a whole training step, with torch's fused AdamW, in place.

    Args:
        gradients: ``(params, batch) -> (grads, losses)``.
        params: stacked; they are trained.
        hyper: of the optimizer.
    """
    leaves: Sequence[Tensor] = pytree.flatten(params)[0]
    optimizer = torch.optim.AdamW(leaves, fused=True, **hyper)

    def run(batch: Tensor) -> Tensor:
        grads, losses = gradients(params, batch)
        for leaf, grad in zip(leaves, pytree.flatten(grads)[0], strict=True):
            leaf.grad = grad
        optimizer.step()
        return losses

    return run
