"""The arguments to differentiate by, and how gradients of parameters are collected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fpipe.inputs.signature import is_differentiable
from fpipe.spec.precision import Precision
from fpipe.spec.returns import LOSS, Returns
from fpipe.spec.trainable import ALL, Trainable


@dataclass(frozen=True)
class Sink:
    """How every parameter's gradients are collected.

    Attributes:
        lift: from a leaf and the rows of a microbatch to what the gradient is taken by, such as the
            leaf repeated for each row; None for the leaf itself.
        fold: what of a microbatch's gradient is kept, such as its norm; None for all of it.
        join: the dimension along which microbatches are concatenated, and their losses too; None
            for the weighted sum of both.
        everywhere: every rank gets all of them, and not those of its own stages alone.
    """

    lift: Callable[[Tensor, int], Tensor] | None = None
    fold: Callable[[Tensor], Tensor] | None = None
    join: int | None = None
    everywhere: bool = False

    def lifted(self, leaf: Tensor, rows: int) -> Tensor:
        """The tensor to differentiate by in place of a leaf, for a microbatch of `rows` rows."""
        return leaf if self.lift is None else self.lift(leaf, rows)

    def folded(self, gradient: Tensor) -> Tensor:
        """Reduce the gradient of a microbatch to what is kept."""
        return gradient if self.fold is None else self.fold(gradient)


SUM = Sink()
"""Sums the gradients, as a step does."""


@dataclass(frozen=True)
class Objective:
    """The function's results, the arguments to differentiate by, and the gradient reduction.

    Attributes:
        returns: what the loss function returns.
        loss_shape: shape of the loss, with None for a size that the arguments tell.
        argnums: what gradients are taken by, ``"params"`` and ``"batch"``.
        trainable: which parameters get a gradient.
        accum_dtype: dtype to sum parameter gradients in, None for their own.
        precision: which says so in its place, if there is one.
        sink: how parameter gradients are collected.
    """

    returns: Returns = LOSS
    loss_shape: tuple[int | None, ...] = ()
    argnums: tuple[str, ...] = ("params",)
    trainable: Trainable = ALL
    accum_dtype: torch.dtype | None = None
    precision: Precision | None = None
    sink: Sink = SUM

    @property
    def sum_dtype(self) -> torch.dtype | None:
        """The dtype to sum parameter gradients in; None for their own."""
        return self.accum_dtype if self.precision is None else self.precision.sum_dtype

    def is_by(self, argument: str, value: Tensor) -> bool:
        """Whether the gradient by a leaf of an argument is asked for, and exists."""
        return argument in self.argnums and is_differentiable(value)
