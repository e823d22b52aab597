"""An optimizer's step of one parameter: a pure function of it, its gradient and state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

Moments = dict[str, Tensor]
"""The state of one parameter, by the names that the optimizer gives: ``exp_avg``."""


class LeafUpdate(Protocol):
    """The pure step of one optimizer, for parameters of any kind.

    Attributes:
        defaults: hyperparameters by default.
    """

    defaults: dict[str, Any]

    def replaced(self, hyper: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
        """All hyperparameters, of which some are replaced.

        Raises:
            FpipeError: the optimizer does not have one of them, or refuses it.
        """

    def init(self, param: Tensor, hyper: Mapping[str, Any]) -> Moments:
        """The state before the first step."""

    def names(self, param: Tensor, hyper: Mapping[str, Any]) -> list[str]:
        """The names of what `init` makes, without making it."""

    def takes_stacked(self, params: Tensor, hyper: Mapping[str, Any]) -> bool:
        """Whether parameters along dimension 0 may be taken for one, to the same bits."""

    def held(self, value: Tensor, device: torch.device) -> Tensor:
        """A tensor of a state that was read from a file, where it is to live.

        Args:
            value: on the CPU.
            device: of the parameter.
        """

    def check_divided(self, name: str, param: Tensor, hyper: Mapping[str, Any]) -> None:
        """Refuse to update a part of a parameter by itself, where the whole would move otherwise.

        Raises:
            FpipeError: the optimizer computes with more than the elements one by one.
        """

    def __call__(
        self,
        param: Tensor,
        grad: Tensor,
        moments: Moments,
        hyper: Mapping[str, Any],
        count: int,
        *,
        in_place: bool = False,
    ) -> tuple[Tensor, Moments]:
        """The parameter and its state after one step.

        Args:
            param: any shape and floating-point dtype.
            grad: like `param`.
            moments: what `init` or the step before has returned.
            hyper: all hyperparameters. A float may be a tensor without dimensions, which may be
                mapped by `torch.func.vmap` or have a history of autograd.
            count: how many steps were made before.
            in_place: write into `param` and `moments`, and return them.
        """


def held_beside(value: Tensor, device: torch.device) -> Tensor:
    """A tensor of a state beside its parameter; one without dimensions is a number of the CPU."""
    return value.to(device) if value.dim() else value
