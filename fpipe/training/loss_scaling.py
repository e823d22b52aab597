"""Scaling of the loss, so that gradients in float16 neither vanish nor overflow.

loss · scale ── backward ──► gradients · scale ── / scale ──► update
                                  └ one is not finite: no update, and a smaller scale

Source: Micikevicius et al., Mixed Precision Training (2018); the rule is `torch.amp.GradScaler`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.errors import FpipeError, a_type


class LossScale(NamedTuple):
    """The scale of the loss, as a value.

    Attributes:
        scale: what the loss is multiplied with: a float32 tensor without dimensions, on the CPU.
        growth_tracker: how many steps have had finite gradients since it changed: an int32 tensor
            without dimensions, on the CPU.
    """

    scale: Tensor
    growth_tracker: Tensor


class LossScaling(NamedTuple):
    """The rule by which the scale changes.

    Attributes:
        first: the scale of the first step.
        growth: what it is multiplied with after `interval` finite steps in a row.
        backoff: what it is multiplied with after a step that is not finite.
        interval: the number of steps.
    """

    first: float
    growth: float
    backoff: float
    interval: int

    def init(self) -> LossScale:
        """The scale of the first step."""
        with torch.device("cpu"):
            return LossScale(torch.tensor(self.first), torch.zeros((), dtype=torch.int32))

    def after(self, before: LossScale, *, finite: bool) -> LossScale:
        """The scale of the next step, after one whose gradients were `finite`, or were not."""
        scale, count = before
        if not finite:
            return LossScale(scale * self.backoff, torch.zeros_like(count))
        if int(count) + 1 < self.interval:
            return LossScale(scale, count + 1)
        grown = scale * self.growth
        return LossScale(grown if grown.isfinite() else scale, torch.zeros_like(count))


def read_loss_scale(loss_scale: Any) -> LossScaling | None:
    """The rule that a user names, as for `fpipe.train`."""
    if loss_scale is None:
        return None
    if isinstance(loss_scale, torch.amp.GradScaler):
        scaler = loss_scale
    elif loss_scale == "dynamic":
        scaler = torch.amp.GradScaler("cpu")
    else:
        raise FpipeError(
            f'loss_scale={loss_scale!r:.60} is {a_type(loss_scale)}: it must be "dynamic", a '
            "torch.amp.GradScaler whose settings are taken, or None"
        )
    if not scaler.is_enabled():
        return None
    return LossScaling(
        float(scaler.get_scale()),
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    )


def check_scaled(leaves: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse to train parameters of float16, whose gradients have no room without the scale."""
    for name, leaf in leaves:
        if leaf.dtype == torch.float16:
            raise FpipeError(
                f"loss_scale= with the parameter {name!r} of float16, in which its gradient is too "
                "small without the scale: pass float32 parameters, and compute in float16 by "
                "mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16, "
                "reduce_dtype=torch.float32)"
            )
