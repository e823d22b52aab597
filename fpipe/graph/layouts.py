"""How the outputs of a graph lie in memory, and copies that lay them out as they should.

A graph is traced once, and cut into pieces that are compiled apart: one must leave a value as the
others, in whose kernels its strides are written, expect it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fpipe.errors import StageError
from fpipe.graph.nodes import value_of

aten = torch.ops.aten


class Layout(NamedTuple):
    """Shape and strides of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides that tell: one along which there is a single element does not."""
        pairs = zip(self.shape, self.stride, strict=True)
        return () if 0 in self.shape else tuple(step for size, step in pairs if size > 1)


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dimensions of a tensor as its memory has them, the slowest first.

    Example:
        >>> memory_order((4, 2, 3), (1, 12, 4))
        [1, 2, 0]
    """
    return sorted(range(len(shape)), key=lambda dim: (-stride[dim], -shape[dim]))


def layouts_of(graph: fx.Graph) -> list[Layout | None]:
    """The layout of each output of a graph; None of what is no dense tensor."""
    returned: Any = graph.output_node().args[0]
    values = [node.meta["val"] if isinstance(node, fx.Node) else node for node in returned]
    return [
        Layout(tuple(value.shape), value.stride())
        if isinstance(value, Tensor) and value.layout == torch.strided
        else None
        for value in values
    ]


def unlike(expected: Sequence[Layout | None], actual: Sequence[Layout | None]) -> list[int]:
    """The numbers of the outputs that do not lie as expected."""
    return [
        number
        for number, (wanted, layout) in enumerate(zip(expected, actual, strict=True))
        if wanted is not None and layout is not None and wanted.steps != layout.steps
    ]


def lay_out(graph: fx.Graph, layouts: Mapping[int, Layout]) -> None:
    """Let a graph return copies of outputs that lie as they should.

    Args:
        graph: changed in place.
        layouts: by number of the output.

    Raises:
        StageError: a layout has gaps, or elements in the same place.
    """
    end = graph.output_node()
    returned: Any = end.args[0]
    outputs = list(returned)
    for number, layout in layouts.items():
        order = memory_order(layout.shape, layout.stride)
        places = [order.index(dim) for dim in range(len(order))]
        dense = torch.empty([layout.shape[dim] for dim in order], device="meta").permute(places)
        if Layout(layout.shape, dense.stride()).steps != layout.steps:
            raise StageError(
                f"{outputs[number]} has shape {layout.shape} and strides {layout.stride}, which "
                "the compiler does not keep: take x.contiguous() of it where it is made"
            )
        outputs[number] = copied(end, outputs[number], order)
    end.args = (type(returned)(outputs),)


def copied(before: fx.Node, node: fx.Node, order: list[int]) -> fx.Node:
    """A copy of a value in front of another node, with its dimensions lying in this order."""

    def call(target: OpOverload, argument: fx.Node, *arguments: Any, **options: Any) -> fx.Node:
        with before.graph.inserting_before(before):
            new = before.graph.call_function(target, (argument, *arguments), options)
        return new

    value, usual = value_of(node), sorted(order)
    turned = order != usual
    if turned:
        node = call(aten.permute.default, node, order)
        node.meta["val"] = value.permute(order)
    copy = call(aten.clone.default, node, memory_format=torch.contiguous_format)
    copy.meta["val"] = value.new_empty([value.shape[d] for d in order])
    if turned:
        back = sorted(usual, key=order.__getitem__)
        view = call(aten.permute.default, copy, back)
        view.meta["val"] = value_of(copy).permute(back)
        return view
    return copy
