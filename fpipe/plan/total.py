"""The losses of all microbatches, put together."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Total(NamedTuple):
    """The losses of all microbatches, put together.

    Attributes:
        loss: the weighted sum of them, or all of them.
        weight: what loss and gradients are to be divided by, one number for each of several losses;
            None for nothing.
    """

    loss: Tensor
    weight: Tensor | None

    @property
    def mean(self) -> Tensor:
        """The loss of the batch."""
        if self.weight is None:
            return self.loss
        return divided(self.loss, self.weight).to(self.loss.dtype)


def divided(value: Tensor, weight: Tensor | None) -> Tensor:
    """A loss or a gradient over its weight; where there are several, they come first in both."""
    return value if weight is None else value / _divisor(value, weight)


def divided_(value: Tensor, weight: Tensor | None) -> Tensor:
    """The same in the memory of `value`, nobody else's, unless its dtype is too narrow."""
    if weight is None:
        return value
    divisor = _divisor(value, weight)
    fits = torch.result_type(value, divisor) == value.dtype
    return value.div_(divisor) if fits else value / divisor


def _divisor(value: Tensor, weight: Tensor) -> Tensor:
    weight = weight.to(value.device, non_blocking=value.is_cuda)
    if not weight.dim():
        return weight
    wide = weight.to(torch.promote_types(value.dtype, torch.float32))
    return wide.reshape(*wide.shape, *(1 for _ in value.shape[wide.dim() :]))
