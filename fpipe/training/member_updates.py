"""The steps of all members of an ensemble as one step of stacked parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.errors import FpipeError
from fpipe.torch_internals import is_transformed
from fpipe.training.updates import Moments, Updates, written


class UpdatesOfMembers:
    """`Updates`, mapped over the first dimension of parameter, gradient and state.

    A hyperparameter may be a tensor of one dimension, with a number for each member.
    """

    def __init__(self, updates: Updates) -> None:
        self._updates = updates
        self._elementwise: dict[Any, bool] = {}
        self.defaults = updates.defaults

    def replaced(self, hyper: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
        """As `Updates.replaced`; of a number for each member the first is looked at."""
        self._updates.replaced(hyper, {name: _of_first(value) for name, value in by.items()})
        return dict(hyper) | dict(by)

    def init(self, param: Tensor, hyper: Mapping[str, Any]) -> Moments:
        """As `Updates.init`, with the members along dimension 0."""
        shared = {name: _of_first(value) for name, value in hyper.items()}
        state: Moments = torch.func.vmap(lambda p: self._updates.init(p, shared))(param)
        return pytree.tree_map(torch.clone, state)

    def names(self, param: Tensor, hyper: Mapping[str, Any]) -> list[str]:
        """As `Updates.names`."""
        shared = {name: _of_first(value) for name, value in hyper.items()}
        return self._updates.names(param[0], shared)

    def check_divided(self, name: str, param: Tensor, hyper: Mapping[str, Any]) -> None:
        """As `Updates.check_divided`."""
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
        """As `Updates`, with the members along dimension 0 of all tensors."""
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
        return written(param, moments, *moved) if in_place else moved

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
