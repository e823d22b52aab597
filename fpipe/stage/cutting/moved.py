"""A recorded part of a function, on another device than the one that the function was recorded on.

graph, recorded on cuda:0 ── its devices and constants replaced ──► runs on cuda:1
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from fpipe.stage.foreign.checkpointed import Replay
from fpipe.stage.foreign.custom import Applied


class Move:
    """From the device that a function was recorded on to that of a stage.

    Args:
        home: where it was recorded; None where values are not moved.
        device: of the stage; None with `home`.

    Attributes:
        copies: on `device`, of tensors that the function closes over, each with its original, by
            the name that both have in the recorded graph.
    """

    def __init__(self, home: torch.device | None, device: torch.device | None) -> None:
        self._home, self._device = home, device
        self._names = () if home is None else (home, torch.device(home.type))
        self._texts = tuple(map(str, self._names))
        self.copies: dict[str, tuple[Tensor, Tensor]] = {}

    def place(self, value: Any) -> Any:
        """What takes the place of an argument of an operation: of a device, the other one.

        A name stands for a device too, and a device of no number for the current one.
        """
        if isinstance(value, torch.device) and value in self._names:
            return self._device
        return str(self._device) if isinstance(value, str) and value in self._texts else value

    def constant(self, name: str, value: Any) -> Any:
        """What takes the place of what the function closes over."""
        if not isinstance(value, Tensor) or not value.device == self._home != self._device:
            return value
        if name not in self.copies:
            self.copies[name] = value.detach().to(self._device), value
        return self.copies[name][0]

    def original(self, value: Tensor) -> Tensor:
        """What a copy is of; of any other tensor itself."""
        return next((own for copy, own in self.copies.values() if copy is value), value)


class Moved(Replay):
    """Runs a recorded graph on inputs that lie on another device.

    Args:
        graph: recorded.
        move: from where to where.
    """

    def __init__(self, graph: fx.Graph, move: Move) -> None:
        super().__init__(graph)
        self._move = move

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What the function closes over."""
        return self._move.constant(target, super().get_attr(target, args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """An operation, which may say where its output is to lie."""
        if isinstance(target, Applied):
            target = target.placed(self._move.place)
        args, kwargs = map_aggregate((args, kwargs), self._move.place)
        return super().call_function(target, args, kwargs)
