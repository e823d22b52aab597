"""A key for what a graph computes, so that equal graphs are compiled once."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from fpipe.stage.joint import value_of


def fingerprint(graph: fx.Graph) -> str:
    """A key that two graphs share exactly when they compute the same on the same kind of inputs.

    Node names do not count; ops, their arguments and the placeholders' shapes, strides and dtypes
    do. Of devices it counts which are the same, and not their numbers: ranks that have a device
    each compute the same.
    """
    number = {node: f"%{index}" for index, node in enumerate(graph.nodes)}
    devices: dict[torch.device, str] = {}

    def bare(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return _Bare(number[value])
        if isinstance(value, torch.device):
            return _Bare(devices.setdefault(value, f"{value.type}#{len(devices)}"))
        return value

    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            v = value_of(node)
            lines.append(f"{v.dtype} {tuple(v.shape)} {v.stride()} {bare(v.device)}")
        else:
            arguments = map_aggregate((node.args, node.kwargs), bare)
            lines.append(f"{node.op} {node.target} {arguments!r}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def devices_of(graph: fx.Graph) -> tuple[torch.device, ...]:
    """The devices that a graph names, in the order in which it does."""
    found: dict[torch.device, None] = {}

    def look(value: Any) -> Any:
        if isinstance(value, torch.device):
            found[value] = None
        return value

    for node in graph.nodes:
        if node.op == "placeholder":
            look(value_of(node).device)
        else:
            map_aggregate((node.args, node.kwargs), look)
    return tuple(found)


class _Bare(str):
    """A node or device in a fingerprint: unlike a string argument, it is printed bare."""

    def __repr__(self) -> str:
        return str(self)
