"""A pipeline inside a bigger computation: its loss, and its gradients, with autograd history.

The forward of the autograd node runs a whole step, whose gradients its backward weighs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.autograd.derived import Callee, choosing
from fpipe.autograd.operation import Call
from fpipe.autograd.outputs import without_history
from fpipe.definition import ARGUMENTS
from fpipe.errors import BatchError
from fpipe.execute.header import HISTORY

BY_PARAMETERS: Final = (
    "over processes the loss of pipe.value has a derivative by the parameters alone, and that of a "
    "pipeline that fpipe.grad makes only if its argnums have them: detach what else requires a "
    'gradient; fpipe.grad(pipe, "batch").step returns gradients by the batch'
)


def is_tracked(leaves: Sequence[Any]) -> bool:
    """Whether autograd or `torch.func.grad` wants to know what becomes of any of `leaves`."""
    return torch.is_grad_enabled() and any(
        isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves
    )


def has_history(pipe: Callee) -> bool:
    """Whether the pipeline's loss, or losses, can be differentiated."""
    return pipe.definition.convention.weigh is not None


def tracked_value(pipe: Callee, *arguments: Any, **options: Any) -> Any:
    """The loss, or losses, with history.

    Args:
        pipe: the pipeline.
        arguments: as in `Pipeline.run_step`.
        options: the key.

    Raises:
        BatchError: it is to be differentiated by a batch that several losses share.
    """
    return tracked_step(pipe, (), *arguments, **options)[0]


def tracked_step(
    pipe: Callee, wanted: tuple[str, ...], *arguments: Any, **options: Any
) -> tuple[Any, ...]:
    """The loss and the gradients, with history; arguments and errors are those of `tracked_value`.

    Args:
        wanted: what gradients are to be returned by.

    Returns:
        ``(loss, grads)``, the gradients as a tuple, and aux if there is any.
    """
    leaves, spec = pytree.flatten(arguments)
    definition = pipe.definition
    tracked = {
        name
        for name, own in zip(definition.along, arguments, strict=True)
        if is_tracked(pytree.flatten(own)[0])
    }
    if pipe.rank is not None and not tracked <= {"params"} & {*definition.wanted}:
        value = pipe.run_value(*arguments, **options)
        return without_history(value, leaves, BY_PARAMETERS), ()
    several = bool(definition.loss_shape[bool(definition.convention.vectors) :])
    if "batch" in tracked and several and definition.alone is None:
        raise BatchError(
            "a leaf of the batch requires a gradient, but the losses of single examples, and a "
            "derivative of an ensemble, can be differentiated by the parameters alone: detach the "
            "leaf; torch.func.vmap of torch.func.grad of pipe.value gives gradients by the batch "
            "of each member, and fpipe.vmap(fpipe.jvp(pipe)) can be differentiated by it"
        )
    if several:
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
    call = Call(choosing(pipe, names), "run_step", spec, options, differentiable=True)
    loss, grads, *aux = call.enter(leaves)
    by_name = dict(zip(names, grads, strict=True))
    return loss, tuple(by_name[name] for name in wanted), *aux
