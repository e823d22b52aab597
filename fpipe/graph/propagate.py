"""Find the values of a graph anew: its inputs lie otherwise, or elsewhere, than was recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.graph.nodes import marks_of
from fpipe.inputs.ambient import without_autocast
from fpipe.torch_internals import FakeTensorMode

aten = torch.ops.aten


def propagate(
    graph: fx.Graph, mode: FakeTensorMode, place: Callable[[Any], Any] = lambda value: value
) -> None:
    """Run a graph of pure operations on the fake values of its placeholders and attributes.

    A view that the new strides do not allow becomes a view of a copy.

    Args:
        graph: changed in place.
        mode: the fake-tensor mode of its values.
        place: what takes the place of an argument of an operation, such as a device.
    """
    with mode, torch.no_grad(), without_autocast():
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), place)
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
            try:
                node.meta["val"] = node.target(*args, **kwargs)
            except RuntimeError:
                if node.target is not aten.view.default:
                    raise
                _view_of_copy(graph, node, args)


def _view_of_copy(graph: fx.Graph, node: fx.Node, args: tuple[Any, ...]) -> None:
    value: Tensor = args[0].contiguous()
    with graph.inserting_before(node):
        options: dict[str, Any] = {"memory_format": torch.contiguous_format}
        copy = graph.call_function(aten.clone.default, (node.args[0],), options)
    copy.meta |= {"val": value} | marks_of(node)
    node.update_arg(0, copy)
    node.meta["val"] = aten.view.default(value, *args[1:])
