"""Sinks: what becomes of the gradients of the parameters, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


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
        """What the gradient of a leaf is taken by, for a microbatch of so many rows."""
        return leaf if self.lift is None else self.lift(leaf, rows)

    def folded(self, gradient: Tensor) -> Tensor:
        """What is kept of the gradient of a microbatch."""
        return gradient if self.fold is None else self.fold(gradient)


SUM = Sink()
"""Of a step: gradients are summed."""
