"""Sum parameter gradients over microbatches inside the graph.

Each parameter gradient gets two more nodes: itself in the dtype of the sum, which starts the sum
without a zero-fill, and the sum so far plus itself, which continues it without a separate pass.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from fpipe.stage.joint import Param, Source, Sum, value_of

aten = torch.ops.aten


def add_sums(
    graph: fx.Graph,
    gradients: Mapping[Param, fx.Node],
    dtype: torch.dtype | None,
    *,
    apart: bool = False,
) -> dict[Source, Sum]:
    """Add the nodes of a `Sum` to `graph` for each parameter leaf in `gradients`.

    Args:
        graph: extended in place; the new nodes have fake values.
        gradients: the gradient of each parameter leaf that has one.
        dtype: the dtype to sum in, or None for the gradient's own; a complex gradient is summed in
            a complex dtype only, and a real one in a real.
        apart: sum nothing: each microbatch's gradient is kept by itself.
    """
    if apart:
        return {source: Sum(node.name, None, node.name) for source, node in gradients.items()}
    end = graph.output_node()
    sums: dict[Source, Sum] = {}
    for source, gradient in gradients.items():
        value = value_of(gradient)
        with graph.inserting_before(end):
            start = gradient
            if (
                dtype is not None
                and dtype != value.dtype
                and dtype.is_complex == value.dtype.is_complex
            ):
                start = graph.call_function(aten._to_copy.default, (gradient,), {"dtype": dtype})
                start.meta["val"] = value.to(dtype)
            so_far = graph.placeholder(f"sum_so_far_{source.leaf}")
            so_far.meta["val"] = value_of(start)
            total = graph.call_function(aten.add.Tensor, (so_far, start))
            total.meta["val"] = value_of(start)
        sums[source] = Sum(start.name, so_far.name, total.name)
    return sums
