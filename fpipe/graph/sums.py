"""Sum parameter gradients over microbatches inside the graph.

Each parameter gradient gets two more nodes: itself in the dtype of the sum, which starts the sum
without a zero-fill, and the sum so far plus itself, which continues it without a separate pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fpipe.graph.joint import Sum
from fpipe.graph.nodes import value_of
from fpipe.graph.sources import Param, Source

aten = torch.ops.aten


def add_sums(
    graph: fx.Graph,
    gradients: Mapping[Param, fx.Node],
    dtype: torch.dtype | None,
) -> dict[Source, Sum]:
    """Add the nodes of a `Sum` to `graph` for each parameter leaf in `gradients`.

    Args:
        graph: placeholders first; extended in place, and the new nodes have fake values.
        gradients: the gradient of each parameter leaf that has one.
        dtype: the dtype to sum in, or None for the gradient's own; a complex gradient is summed in
            a complex dtype only, and a real one in a real.
    """
    first = next(node for node in graph.nodes if node.op != "placeholder")
    types = {source: _sum_type(gradient, dtype) for source, gradient in gradients.items()}
    so_far: dict[Param, fx.Node] = {}
    for source, gradient in gradients.items():
        with graph.inserting_before(first):
            so_far[source] = graph.placeholder(f"sum_so_far_{source.leaf}")
        so_far[source].meta["val"] = value_of(gradient).to(types[source])

    def append(after: fx.Node, target: OpOverload, *arguments: Any, **options: Any) -> fx.Node:
        # Right where the gradient is made: what waits for its sum takes memory. A gradient is never
        # a placeholder; one that would be is copied, to be the caller's own.
        assert after.op == "call_function", after
        with graph.inserting_after(after):
            return graph.call_function(target, arguments, options)

    sums: dict[Source, Sum] = {}
    for source, gradient in gradients.items():
        start, sum_type = gradient, types[source]
        if sum_type != value_of(gradient).dtype:
            start = append(gradient, aten._to_copy.default, gradient, dtype=sum_type)
        total = append(start, aten.add.Tensor, so_far[source], start)
        start.meta["val"] = total.meta["val"] = so_far[source].meta["val"]
        sums[source] = Sum(start.name, so_far[source].name, total.name)
    return sums


def _sum_type(gradient: fx.Node, dtype: torch.dtype | None) -> torch.dtype:
    """What a gradient is summed in where `dtype` is asked for."""
    own = value_of(gradient).dtype
    return own if dtype is None or dtype.is_complex != own.is_complex else dtype
