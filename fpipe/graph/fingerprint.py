"""A key for what a graph computes, so that equal graphs are compiled once."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from fpipe.graph.nodes import value_of


def fingerprint(graph: fx.Graph) -> str:
    """A key that two graphs share only if they compute the same on the same kind of inputs.

    Node names do not count; ops, their arguments and the placeholders' shapes, strides and dtypes
    do. Devices and process groups count by which are the same, and not by their numbers: ranks
    that have a device each, and each a group for its own part of a layer, compute the same.
    """
    number = {node: f"%{index}" for index, node in enumerate(graph.nodes)}
    places: dict[torch.device | _Group, str] = {}

    def bare(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return _Bare(number[value])
        if isinstance(value, torch.device):
            return _Bare(places.setdefault(value, f"{value.type}#{len(places)}"))
        if isinstance(value, _Group):
            return _Bare(places.setdefault(value, f"group#{len(places)}"))
        return value

    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            v = value_of(node)
            lines.append(f"{v.dtype} {tuple(v.shape)} {v.stride()} {bare(v.device)}")
        else:
            arguments = map_aggregate(_arguments(node), bare)
            lines.append(f"{node.op} {node.target} {arguments!r}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def places_of(graph: fx.Graph) -> tuple[torch.device | str, ...]:
    """The devices, and the names of process groups, in the order in which a graph has them."""
    places: dict[torch.device | str, None] = {}

    def look(value: Any) -> Any:
        if isinstance(value, torch.device | _Group):
            places[value] = None
        return value

    for node in graph.nodes:
        if node.op == "placeholder":
            look(value_of(node).device)
        else:
            map_aggregate(_arguments(node), look)
    return tuple(places)


class _Bare(str):
    """A node, device or group in a fingerprint: unlike a string argument, it is printed bare."""

    def __repr__(self) -> str:
        return str(self)


class _Group(str):
    """The name of a process group, which each process may count in its own way."""


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a node, those that name a process group marked."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.args, node.kwargs
    names = [argument.name for argument in schema.arguments]
    args = (_marked(name, value) for name, value in zip(names, node.args, strict=False))
    return tuple(args), {name: _marked(name, value) for name, value in node.kwargs.items()}


def _marked(name: str, value: Any) -> Any:
    return _Group(value) if name == "group_name" and isinstance(value, str) else value
