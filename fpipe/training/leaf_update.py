"""An optimizer's step of one parameter: a pure function of it, its gradient and state.

Those of all members of an ensemble are one step too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.errors import FpipeError
from fpipe.torch_internals import is_transformed

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


class UpdatesOfMembers:
    """A `LeafUpdate`, mapped over the first dimension of parameter, gradient and state.

    A hyperparameter may be a tensor of one dimension, with a number for each member.
    """

    def __init__(self, updates: LeafUpdate) -> None:
        self._updates = updates
        self._elementwise: dict[Any, bool] = {}
        self.defaults = updates.defaults

    def replaced(self, hyper: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
        """As `LeafUpdate.replaced`; of a number for each member the first is looked at."""
        self._updates.replaced(hyper, {name: _of_first(value) for name, value in by.items()})
        return dict(hyper) | dict(by)

    def init(self, param: Tensor, hyper: Mapping[str, Any]) -> Moments:
        """As `LeafUpdate.init`, with the members along dimension 0."""
        shared = {name: _of_first(value) for name, value in hyper.items()}
        state: Moments = torch.func.vmap(lambda p: self._updates.init(p, shared))(param)
        return pytree.tree_map(torch.clone, state)

    def names(self, param: Tensor, hyper: Mapping[str, Any]) -> list[str]:
        """As `LeafUpdate.names`."""
        shared = {name: _of_first(value) for name, value in hyper.items()}
        return self._updates.names(param[0], shared)

    def takes_stacked(self, params: Tensor, hyper: Mapping[str, Any]) -> bool:
        """As `LeafUpdate.takes_stacked`."""
        return False

    def check_divided(self, name: str, param: Tensor, hyper: Mapping[str, Any]) -> None:
        """As `LeafUpdate.check_divided`."""
        self._updates.check_divided(name, param[0], hyper)

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
        """As `LeafUpdate`, with the members along dimension 0 of all tensors."""
        each = {name: value for name, value in hyper.items() if _is_of_members(value)}
        for name, value in each.items():
            if len(value) != len(param):
                raise FpipeError(
                    f"{name} has {len(value)} numbers for {len(param)} members: give one for "
                    "each, or one for all"
                )

        def one(param: Tensor, grad: Tensor, moments: Moments, single: Mapping[str, Any]) -> Any:
            return self._updates(param, grad, moments, {**hyper, **single}, count)

        if not each and self._is_elementwise(param, hyper):
            return self._updates(param, grad, moments, hyper, count, in_place=in_place)
        moved: tuple[Tensor, Moments] = torch.func.vmap(one)(param, grad, moments, each)
        if not in_place:
            return moved
        param.copy_(moved[0])
        for name, value in moved[1].items():
            moments[name].copy_(value)
        return param, moments

    def _is_elementwise(self, param: Tensor, hyper: Mapping[str, Any]) -> bool:
        """Whether the members together may be taken for one parameter: to the same bits."""
        if is_transformed(param) or any(isinstance(value, Tensor) for value in hyper.values()):
            return False
        kind = param.shape, param.dtype, param.device
        if kind not in self._elementwise:
            self._elementwise[kind] = self._updates.takes_stacked(param, hyper)
        return self._elementwise[kind]


def _is_of_members(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


def _of_first(value: Any) -> Any:
    return value[0] if _is_of_members(value) else value
