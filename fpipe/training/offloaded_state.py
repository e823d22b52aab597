"""The state of an optimizer on the CPU, in its memory or in files, while parameters lie elsewhere.

param, grad ── to the CPU ──► the optimizer's step ──► param, back to its device
state, on the CPU ──────────►        there         ──► state, on the CPU
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from fpipe.errors import FpipeError, a_type
from fpipe.inputs.host_memory import CPU, MappedFolder, on_the_cpu
from fpipe.torch_internals import is_transformed
from fpipe.training.leaf_update import LeafUpdate, Moments


class Offloaded:
    """A `LeafUpdate` whose state lives on the CPU, where its steps are made.

    Args:
        updates: the step.
        keep: puts a tensor of the state where it is to live.
    """

    def __init__(self, updates: LeafUpdate, keep: Callable[[Tensor], Tensor]) -> None:
        self._updates = updates
        self._keep = keep
        self.defaults = updates.defaults

    def with_updates(self, change: Callable[[LeafUpdate], LeafUpdate]) -> Offloaded:
        """Another step, whose state lives where that of this one does."""
        return Offloaded(change(self._updates), self._keep)

    def replaced(self, hyper: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
        """As `LeafUpdate.replaced`."""
        return self._updates.replaced(hyper, by)

    def init(self, param: Tensor, hyper: Mapping[str, Any]) -> Moments:
        """As `LeafUpdate.init`."""
        return self._kept(self._updates.init(param.detach().to(CPU), hyper))

    def names(self, param: Tensor, hyper: Mapping[str, Any]) -> list[str]:
        """As `LeafUpdate.names`."""
        return self._updates.names(torch.empty_like(param, device=CPU), hyper)

    def takes_stacked(self, params: Tensor, hyper: Mapping[str, Any]) -> bool:
        """As `LeafUpdate.takes_stacked`."""
        return self._updates.takes_stacked(torch.empty_like(params, device=CPU), hyper)

    def held(self, value: Tensor, device: torch.device) -> Tensor:
        """As `LeafUpdate.held`."""
        return self._keep(value) if value.dim() else value

    def check_divided(self, name: str, param: Tensor, hyper: Mapping[str, Any]) -> None:
        """As `LeafUpdate.check_divided`."""
        self._updates.check_divided(name, torch.empty_like(param, device=CPU), hyper)

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
        """As `LeafUpdate`: what comes back of the parameter lies where it did."""
        if is_transformed(param) or is_transformed(grad):
            raise FpipeError(
                "offload= within a transform of torch.func, which follows no value to the CPU: "
                "make the trainer without it"
            )
        here, gradient = param.to(CPU), grad.to(CPU)
        moved, state = self._updates(here, gradient, moments, hyper, count, in_place=in_place)
        if not in_place:
            return moved.to(param.device), self._kept(state)
        if here is not param:
            param.copy_(moved)
        return param, state

    def _kept(self, state: Moments) -> Moments:
        return {name: self._keep(value) if value.dim() else value for name, value in state.items()}


def offloaded(updates: LeafUpdate, offload: str | PathLike[str] | None) -> LeafUpdate:
    """The step with its state where a user's ``offload`` says.

    Raises:
        FpipeError: it is no path, or no directory can be there.
    """
    if offload is None:
        return updates
    if not isinstance(offload, str | PathLike):
        raise FpipeError(
            f'offload={offload!r:.60} is {a_type(offload)}: it must be "cpu", a path of a '
            "directory, or None"
        )
    if offload == "cpu":
        return Offloaded(updates, partial(on_the_cpu, pin=torch.cuda.is_available()))
    return Offloaded(updates, MappedFolder(offload).hold)
