"""The state of a function that is cut: which of its leaves change, and in which stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fpipe.divide.dividing import Segment
from fpipe.errors import StageError
from fpipe.graph.joint import StateLeaf, Upstream

_COPIES = frozenset(
    {torch.ops.aten.clone.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default}
)


def keep_changed(graph: fx.Graph, inputs: Sequence[fx.Node], states: int) -> list[int]:
    """Return the leaves of the state that change alone, and say which they are.

    Args:
        graph: returns two lists, of which the first ends with the new state.
        inputs: the placeholders of parameters and state.
        states: how many leaves the state has, the last of `given` and of what is returned.
    """
    end = graph.output_node()
    returned: Any = end.args[0]
    results, gradients = list(returned[0]), returned[1]
    first, before = len(inputs) - states, len(results) - states
    changed = [
        leaf
        for leaf in range(first, len(inputs))
        if _copied(results[before + leaf - first]) is not inputs[leaf]
    ]
    results[before:] = [results[before + leaf - first] for leaf in changed]
    end.args = ((results, gradients),)
    return changed


def _copied(node: Any) -> Any:
    """The node that `node` is a copy of, itself if it is none."""
    while isinstance(node, fx.Node) and node.target in _COPIES:
        node = node.args[0]
    return node


def updates_of(
    name: str,
    paths: Sequence[str],
    segments: Sequence[Segment],
    results: Sequence[Upstream],
    changed: Sequence[int],
) -> dict[int, Upstream]:
    """Where each leaf of the state that changes is brought up to date: where it is read.

    Args:
        name: of the function, for messages.
        paths: how a user would write each leaf of parameters and state.
        segments: those between the cuts.
        results: where each result comes from, those of `changed` last.
        changed: the leaves of the state that change.

    Raises:
        StageError: another stage reads it.
    """
    updates: dict[int, Upstream] = {}
    for leaf, source in zip(changed, results[len(results) - len(changed) :], strict=True):
        updates[leaf] = source
        readers = [
            i for i, segment in enumerate(segments) if StateLeaf(leaf) in segment.sources.values()
        ]
        if any(reader != source.stage for reader in readers):
            raise StageError(
                f"{name} reads {paths[leaf]} in stage "
                f"{' and '.join(map(str, readers))} and makes its new value in stage "
                f"{source.stage}: a leaf of the state must be read and brought up to date in "
                "one stage, for the next microbatch begins with it there; move the work "
                "before or after the cut, or split the leaf"
            )
    return updates
