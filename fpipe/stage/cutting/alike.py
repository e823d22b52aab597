"""Segments of a function that differ only in what they read are traced once: the layers of a model.

The trace of one serves the other with its sources renamed, so that pieces and compiled artefacts
are shared too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from fpipe.stage.cutting.segments import Segment
from fpipe.stage.graphs.fingerprint import fingerprint, places_of
from fpipe.stage.graphs.nodes import CHECKPOINT
from fpipe.stage.graphs.sources import Constant, Param, Source, SumSoFar
from fpipe.stage.tracing.abstract import Leaves
from fpipe.stage.tracing.tracer import Traced

_LITERAL = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


def merge_constants(module: fx.GraphModule) -> None:
    """Let equal literals of one element or none be read by one name.

    Literals alone, which the function makes anew in each call: a buffer is written to later.
    """
    names: dict[Hashable, str] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, node.target)
        if not isinstance(value, Tensor) or value.numel() > 1 or value.device.type != "cpu":
            continue
        if all(user.target in _LITERAL for user in node.users):
            key = (value.dtype, tuple(value.shape), repr(value.tolist()))
            node.target = names.setdefault(key, node.target)


def likeness(part: Segment, leaves: Leaves) -> Hashable:
    """Equal for segments of one function whose traces differ only in the names of their sources.

    Args:
        part: its graph's placeholders get the values of `leaves`.
        leaves: its abstract arguments.
    """
    placeholders = [node for node in part.graph.nodes if node.op == "placeholder"]
    for node, value in zip(placeholders, leaves.values, strict=True):
        node.meta["val"] = value
    return (
        fingerprint(part.graph),
        _checkpoints(part.graph),
        places_of(part.graph),
        leaves.differentiable,
        tuple(type(source) for source in leaves.sources),
        tuple(map(len, part.readers)),
    )


def _checkpoints(graph: fx.Graph) -> tuple[tuple[int, bool] | None, ...]:
    """Of each node, which call of checkpoint it is in, and whether it is saved."""
    calls = [node.meta.get(CHECKPOINT) for node in graph.nodes]
    numbers = {call.number: 0 for call in calls if call is not None}
    numbers = {number: index for index, number in enumerate(numbers)}
    return tuple(call and (numbers[call.number], call.saved) for call in calls)


def seen_from(traced: Traced, sources: Sequence[Source], part: Segment) -> Traced:
    """The trace of a segment as that of one like it.

    Args:
        traced: of the other segment.
        sources: what the other reads, in order.
        part: this one.
    """
    names = dict(zip(sources, part.sources, strict=True))

    def rename(source: Source) -> Source:
        match source:
            case Constant():
                return source
            case SumSoFar(leaf):
                return SumSoFar(names[Param(leaf)].leaf)  # type: ignore[union-attr]
            case _:
                return names[source]

    return replace(traced, joint=traced.joint.renamed(rename, part.readers))
