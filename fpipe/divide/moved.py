"""A recorded stage on another device than the one that the function was recorded on.

graph, recorded on cuda:0 ── its devices and constants replaced ──► runs on cuda:1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.graph.propagate import propagate
from fpipe.torch_internals import FakeTensorMode


def move(
    module: fx.GraphModule,
    home: torch.device,
    device: torch.device,
    mode: FakeTensorMode,
    original: Callable[[Tensor], Tensor],
) -> Callable[[Tensor], Tensor]:
    """Let a graph run on another device.

    Args:
        module: changed in place; its placeholders are brought to the device.
        home: where it was recorded.
        device: where it is to run.
        mode: the fake-tensor mode of its values.
        original: of an attribute of the module the tensor that the function closes over.

    Returns:
        The same for the attributes that the module has then, which are copies.
    """
    names = (home, torch.device(home.type))
    texts = tuple(map(str, names))
    copies: list[tuple[Tensor, Tensor]] = []

    def place(value: Any) -> Any:
        # A name stands for a device too, and a device of no number for the current one.
        if isinstance(value, torch.device) and value in names:
            return device
        return str(device) if isinstance(value, str) and value in texts else value

    for node in module.graph.nodes:
        if node.op == "placeholder" and node.meta["val"].device == home:
            with mode:
                node.meta["val"] = node.meta["val"].to(device)
        elif node.op == "get_attr":
            value = getattr(module, node.target)
            if isinstance(value, Tensor) and value.device == home:
                copies.append((value.to(device), original(value)))
                name = f"{node.target}_{len(copies)}".replace(".", "_")
                module.register_buffer(name, copies[-1][0])
                node.target = name
                with mode:
                    node.meta["val"] = node.meta["val"].to(device)
    propagate(module.graph, mode, place)

    def of(value: Tensor) -> Tensor:
        return next((own for copy, own in copies if copy is value), original(value))

    return of
