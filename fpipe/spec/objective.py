"""What the stages of a chain are differentiated for, whichever functions they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fpipe.inputs.signature import is_differentiable
from fpipe.spec.returns import LOSS, Returns
from fpipe.spec.sink import SUM, Sink
from fpipe.spec.trainable import ALL, Trainable


@dataclass(frozen=True)
class Objective:
    """What is differentiated, by what, and how the gradients are collected.

    Attributes:
        returns: what the loss function returns.
        loss_shape: shape of the loss, with None for a size that the arguments tell.
        argnums: what gradients are taken by, ``"params"`` and ``"batch"``.
        trainable: which parameters get a gradient.
        accum_dtype: dtype to sum parameter gradients in, None for their own.
        sink: how parameter gradients are collected.
    """

    returns: Returns = LOSS
    loss_shape: tuple[int | None, ...] = ()
    argnums: tuple[str, ...] = ("params",)
    trainable: Trainable = ALL
    accum_dtype: torch.dtype | None = None
    sink: Sink = SUM

    def is_by(self, argument: str, value: Tensor) -> bool:
        """Whether the gradient by a leaf of an argument is asked for, and exists."""
        return argument in self.argnums and is_differentiable(value)
