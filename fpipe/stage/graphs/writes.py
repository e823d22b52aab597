"""Writes to a part of a value, in recorded graphs, by ops that can be differentiated.

Functionalisation records ``x[1:] = y`` as ops that are made for it, and not all have a derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import fx

from fpipe.stage.graphs.nodes import inserted, replace, value_of

aten = torch.ops.aten


def make_writes_differentiable(graph: fx.Graph) -> None:
    """Replace the functional ``copy`` and ``zero``, and writes to parts of complex values.

    ``copy(target, value)`` is `value` in the shape and dtype of `target`; ``zero(target)``, which
    has no derivative where that is complex, is zeros. The others become writes to the same parts of
    real values.

    Args:
        graph: of a forward; changed in place.
    """
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        target = value_of(node)
        value = inserted(node, aten._to_copy.default, node.args[1], dtype=target.dtype)
        replace(node, inserted(node, aten.expand.default, value, list(target.shape)))
    for node in graph.find_nodes(op="call_function", target=aten.zero.default):
        replace(node, inserted(node, aten.zeros_like.default, node.args[0]))
    for target, write in _WRITES.items():
        for node in graph.find_nodes(op="call_function", target=target):
            if value_of(node).dtype.is_complex:
                whole, part, *place = node.args
                made = write(node, _as_real(node, whole), _as_real(node, part), *place)
                replace(node, inserted(node, aten.view_as_complex.default, made))


def _slice(
    node: fx.Node, whole: fx.Node, part: fx.Node, dim: int = 0, *others: int | None
) -> fx.Node:
    return inserted(node, node.target, whole, part, dim % value_of(node).dim(), *others)


def _select(node: fx.Node, whole: fx.Node, part: fx.Node, dim: int, index: int) -> fx.Node:
    return inserted(node, node.target, whole, part, dim % value_of(node).dim(), index)


def _diagonal(
    node: fx.Node, whole: fx.Node, part: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> fx.Node:
    dims = (dim % value_of(node).dim() for dim in (dim1, dim2))
    last = inserted(node, aten.transpose.int, part, -2, -1)  # the diagonal is the last dimension
    return inserted(node, node.target, whole, last, offset, *dims)


_WRITES: Final[Mapping[Any, Callable[..., fx.Node]]] = {
    aten.slice_scatter.default: _slice,
    aten.select_scatter.default: _select,
    aten.diagonal_scatter.default: _diagonal,
}
"""How each writes to a part of a value with one more dimension, the last."""


def _as_real(node: fx.Node, value: Any) -> fx.Node:
    resolved = inserted(node, aten.resolve_conj.default, value)
    return inserted(node, aten.view_as_real.default, resolved)
