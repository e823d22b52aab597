"""Views by strides, in recorded graphs: elements are read and written by their number instead.

``as_strided`` looks at memory, and so relies on the layout that a value had while it was recorded;
what crosses a boundary between stages has another. The derivative that torch has of
``as_strided_scatter``, as which a write to such a view is recorded, is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fpipe.errors import StageError
from fpipe.stage.graphs.layouts import memory_order
from fpipe.stage.graphs.nodes import inserted, replace, value_of

aten = torch.ops.aten


def number_elements(name: str, graph: fx.Graph) -> None:
    """Replace ``as_strided`` by a gather, and ``as_strided_scatter`` by a scatter.

    Args:
        name: the function in messages.
        graph: of a forward; changed in place.

    Raises:
        StageError: a view looks at memory that is not that of the value whose view it is, or that
            has gaps.
    """
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        make = _Maker(name, node)
        elements = make(aten.index_select.default, make.flat(), 0, make.numbers())
        replace(node, make(aten.reshape.default, elements, node.args[1]))
    for node in graph.find_nodes(op="call_function", target=aten.as_strided_scatter.default):
        make = _Maker(name, node)
        part = make(aten.reshape.default, node.args[1], [-1])
        replace(node, make.shaped(make(aten.scatter.src, make.flat(), 0, make.numbers(), part)))


class _Maker:
    """Makes the nodes that take the place of one.

    Args:
        name: the function in messages.
        node: a view by strides, or a write to one.
    """

    def __init__(self, name: str, node: fx.Node) -> None:
        self._name = name
        self._node = node
        first = 2 if node.target is aten.as_strided_scatter.default else 1
        arguments: Sequence[Any] = node.args[first:]
        whole: Any = node.args[0]
        self._whole, self._value = whole, value_of(whole)
        self._size, self._stride = arguments[:2]
        given = arguments[2] if len(arguments) > 2 else None
        self._offset = self._value.storage_offset() if given is None else given
        self._order = memory_order(self._value.shape, self._value.stride())
        if not self._value.permute(self._order).is_contiguous():
            raise self._refusal("which has gaps in its memory")
        if self._value.is_conj() or self._value.is_neg():
            raise self._refusal("whose memory holds something else, before resolve_conj()")

    def __call__(self, target: Any, *arguments: Any, **options: Any) -> fx.Node:
        """A node that calls `target`."""
        return inserted(self._node, target, *arguments, **options)

    def flat(self) -> fx.Node:
        """The elements of the value in the order of its memory."""
        ordered = self(aten.permute.default, self._whole, self._order)
        return self(aten.reshape.default, ordered, [-1])

    def shaped(self, flat: fx.Node) -> fx.Node:
        """The value that has these elements."""
        ordered = self(aten.reshape.default, flat, [self._value.shape[dim] for dim in self._order])
        places = [self._order.index(dim) for dim in range(len(self._order))]
        return self(aten.permute.default, ordered, places)

    def numbers(self) -> fx.Node:
        """The numbers of the elements that the view looks at."""
        start = self._offset - self._value.storage_offset()
        reach = sum((n - 1) * step for n, step in zip(self._size, self._stride, strict=True))
        if 0 not in self._size and not 0 <= start <= start + reach < self._value.numel():
            raise self._refusal("beyond its memory")
        every = self(aten.arange.default, self._value.numel(), device=self._value.device)
        looked_at = self(aten.as_strided.default, every, self._size, self._stride, start)
        return self(aten.reshape.default, looked_at, [-1])

    def _refusal(self, why: str) -> StageError:
        return StageError(
            f"{self._name} takes as_strided({list(self._size)}, {list(self._stride)}, "
            f"{self._offset}) of a value of shape {tuple(self._value.shape)} {why}: take it of the "
            "whole value, of contiguous(), or index it"
        )
