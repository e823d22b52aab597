"""The loss of connectionist temporal classification, whose shapes do not depend on its data.

torch keeps for its backward a table as wide as the longest target of the batch: the width is data,
which abstract tensors have not. Here it is as wide as a target can be.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_LIBRARY = torch.library.Library("fpipe", "FRAGMENT")
_LIBRARY.define(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, "
    "int blank, bool zero_infinity) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "ctc_loss_backward(Tensor grad, Tensor log_probs, Tensor targets, Tensor input_lengths, "
    "Tensor target_lengths, Tensor losses, Tensor log_alpha, int blank, bool zero_infinity) "
    "-> Tensor"
)

_REDUCTIONS = ("none", "mean", "sum")


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """The loss, as `torch.ctc_loss` and `torch.nn.functional.ctc_loss` return it."""
    inputs, symbols = (
        torch.as_tensor(lengths).reshape(-1) for lengths in (input_lengths, target_lengths)
    )
    chosen = _REDUCTIONS[reduction] if isinstance(reduction, int) else reduction
    if chosen not in _REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is not mean, sum or none")
    several = log_probs.dim() == 3
    losses, _ = torch.ops.fpipe.ctc_loss(
        log_probs if several else log_probs.unsqueeze(1),
        targets,
        inputs,
        symbols,
        blank,
        zero_infinity,
    )
    if zero_infinity:
        losses = torch.where(losses == math.inf, 0.0, losses)
    if chosen == "mean":
        return (losses / symbols.clamp_min(1).to(losses.dtype)).mean()
    if chosen == "sum":
        return losses.sum()
    return losses if several else losses.squeeze(0)


@torch.library.impl(_LIBRARY, "ctc_loss", "CompositeExplicitAutograd")
def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    # The lengths, which may lie on the CPU, are told by value: its kernels want them there.
    losses, alpha = aten._ctc_loss.default(
        log_probs, targets, input_lengths.tolist(), target_lengths.tolist(), blank, zero_infinity
    )
    _, log_alpha = _shapes(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    log_alpha.zero_()[..., : alpha.shape[2]] = alpha
    return losses, log_alpha


@torch.library.impl(_LIBRARY, "ctc_loss_backward", "CompositeExplicitAutograd")
def _ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    losses: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    lengths = (input_lengths.tolist(), target_lengths.tolist())
    alpha = log_alpha[..., : 2 * max(lengths[1], default=0) + 1].contiguous()
    gradient: Tensor = aten._ctc_loss_backward.default(
        grad, log_probs, targets, *lengths, losses, alpha, blank, zero_infinity
    )
    return gradient.contiguous()


@torch.library.register_fake("fpipe::ctc_loss", lib=_LIBRARY)
def _shapes(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    """The losses, and the table: as wide as there are targets of one, or of all in a row."""
    steps, count, classes = log_probs.shape
    if not 0 <= blank < classes:
        raise ValueError(f"blank={blank} is none of the {classes} classes")
    for name, lengths in (("input", input_lengths), ("target", target_lengths)):
        if lengths.shape != (count,):
            raise ValueError(
                f"{name}_lengths has the shape {tuple(lengths.shape)}, for {count} sequences"
            )
    width = 2 * targets.shape[-1] + 1
    return log_probs.new_empty(count), log_probs.new_empty(count, steps, width)


@torch.library.register_fake("fpipe::ctc_loss_backward", lib=_LIBRARY)
def _shape_of_backward(grad: Tensor, log_probs: Tensor, *others: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 6
    gradient = torch.ops.fpipe.ctc_loss_backward(
        grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity
    )
    return gradient, None, None, None, None, None


torch.library.register_autograd("fpipe::ctc_loss", _backward, setup_context=_keep, lib=_LIBRARY)
