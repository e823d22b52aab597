"""Parts of a function that differ only in what they read share one graph: the layers of a model.

The graph of one serves the other with its sources renamed, so that pieces and compiled artefacts
are shared too.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, fx

from fpipe.divide.dividing import Segment
from fpipe.graph.fingerprint import fingerprint, places_of
from fpipe.graph.joint import Constant, Joint, Param, Source, SumSoFar
from fpipe.graph.nodes import CHECKPOINT

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


def likeness(segment: Segment) -> Hashable:
    """Equal for segments of one function whose graphs differ only in the names of their sources.

    Args:
        segment: a stage of the function.
    """
    placeholders = segment.graph.find_nodes(op="placeholder")
    return (
        fingerprint(segment.graph),
        _checkpoints(segment.graph),
        places_of(segment.graph),
        tuple(type(segment.sources.get(node.name)) for node in placeholders),
        tuple(map(len, segment.cotangents)),
        tuple(map(type, segment.owed)),
        tuple(
            isinstance(source, Param) and source in segment.sources.values()
            for source in segment.owed
        ),
    )


def _checkpoints(graph: fx.Graph) -> tuple[tuple[int, bool] | None, ...]:
    """For each node the call of checkpoint that it is in, and whether it is saved."""
    calls = [node.meta.get(CHECKPOINT) for node in graph.nodes]
    numbers = {call.number: 0 for call in calls if call is not None}
    numbers = {number: index for index, number in enumerate(numbers)}
    return tuple(call and (numbers[call.number], call.saved) for call in calls)


def seen_from(joint: Joint, other: Segment, segment: Segment) -> Joint:
    """The finished graph of a segment, made from that of one like it.

    Args:
        joint: of the other segment.
        other: that segment.
        segment: this one.
    """
    names = dict(zip(other.sources.values(), segment.sources.values(), strict=True))
    names |= dict(zip(other.owed, segment.owed, strict=True))

    def rename(source: Source) -> Source:
        match source:
            case Constant():
                return source
            case SumSoFar(leaf):
                return SumSoFar(names[Param(leaf)].leaf)  # type: ignore[union-attr]
            case _:
                return names[source]

    return joint.renamed(
        rename, [[cotangent.reader for cotangent in group] for group in segment.cotangents]
    )
