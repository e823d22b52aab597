"""A pipeline inside a bigger computation: its loss with autograd history.

The forward of the autograd node runs a whole step, whose gradients its backward scales. So the loss
can be differentiated once, by ``backward()`` and by `torch.func.grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.call import Call, choosing
from fpipe.errors import FpipeError


def is_tracked(leaves: Sequence[Any]) -> bool:
    """Whether autograd or `torch.func.grad` wants to know what becomes of any of `leaves`."""
    return torch.is_grad_enabled() and any(
        isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves
    )


def has_history(pipe: Any) -> bool:
    """Whether the pipeline's loss, or losses, can be differentiated."""
    return pipe.definition.convention.weigh is not None


def tracked_value(pipe: Any, params: Any, batch: Any, **options: Any) -> Tensor:
    """The loss, or losses, with history.

    Args:
        pipe: the pipeline.
        params: as in `Pipeline.value`, as are the others.
        batch: the batch.
        options: the key.

    Raises:
        FpipeError: it is to be differentiated by a batch that several losses or processes share.
    """
    leaves, spec = tree.flatten((params, batch))
    names = tuple(
        name
        for name, argument in (("params", params), ("batch", batch))
        if is_tracked(tree.flatten(argument)[0])
    )
    definition = pipe.definition
    if "batch" in names and (definition.loss_shape or pipe.rank is not None):
        raise FpipeError(
            "a leaf of the batch requires a gradient, but the value of a transformed pipeline, "
            "or over processes, can be differentiated by the parameters alone: detach "
            'the leaf; fpipe.grad(pipe, "batch") returns gradients by the batch, and '
            "torch.func.vmap of torch.func.grad of pipe.value those of each member"
        )
    loss: Tensor = Call(choosing(pipe, names), "run_step", spec, options, tracked=True).enter(
        leaves
    )[0]
    return loss
