"""Averages of parameters over the steps, as one more tensor of each parameter's state.

param, state ── the optimizer's step ──► param, state
average ── average + (1 - ema) * (param - average) ──► average
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from fpipe.errors import FpipeError
from fpipe.training.leaf_update import LeafUpdate, Moments

EMA: Final = "ema"
"""The name of the average in a parameter's state."""


class Averaging:
    """A `LeafUpdate` that also keeps an exponential moving average of the parameter.

    As `torch.optim.swa_utils.get_ema_multi_avg_fn` makes it (Polyak and Juditsky, 1992). It begins
    with the parameters before the first step.

    Args:
        updates: the step of the optimizer.
        ema: the share of the average that stays in each step.

    Attributes:
        defaults: hyperparameters by default.
    """

    def __init__(self, updates: LeafUpdate, ema: float) -> None:
        self._updates = updates
        self._ema = ema
        self.defaults = updates.defaults

    def replaced(self, hyper: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
        """As `LeafUpdate.replaced`."""
        return self._updates.replaced(hyper, by)

    def init(self, param: Tensor, hyper: Mapping[str, Any]) -> Moments:
        """As `LeafUpdate.init`, with the average."""
        state = self._updates.init(param, hyper)
        if EMA in state:
            raise FpipeError(f"the optimizer has {EMA!r} in its state, the name of fpipe's average")
        return state | {EMA: param.detach().clone()}

    def names(self, param: Tensor, hyper: Mapping[str, Any]) -> list[str]:
        """As `LeafUpdate.names`, with that of the average."""
        return [*self._updates.names(param, hyper), EMA]

    def takes_stacked(self, params: Tensor, hyper: Mapping[str, Any]) -> bool:
        """As `LeafUpdate.takes_stacked`."""
        return self._updates.takes_stacked(params, hyper)

    def held(self, value: Tensor, device: torch.device) -> Tensor:
        """As `LeafUpdate.held`."""
        return self._updates.held(value, device)

    def check_divided(self, name: str, param: Tensor, hyper: Mapping[str, Any]) -> None:
        """As `LeafUpdate.check_divided`."""
        self._updates.check_divided(name, param, hyper)

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
        """As `LeafUpdate`, with the average."""
        if EMA not in moments:
            raise FpipeError(
                f"state.moments has no {EMA!r}: the state is that of a trainer without ema=; make "
                "one by trainer.init(params)"
            )
        others = {name: value for name, value in moments.items() if name != EMA}
        moved, state = self._updates(param, grad, others, hyper, count, in_place=in_place)
        average, share = moments[EMA], 1 - self._ema
        after = average.lerp_(moved, share) if in_place else average.lerp(moved, share)
        return moved, state | {EMA: after}
