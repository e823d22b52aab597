"""The stage that each node of a recorded forward belongs to.

Work belongs to the stage in which it was recorded, except that what depends on parameters alone, or
on the batch alone, is done by whoever reads it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from torch import fx

from fpipe.graph.nodes import STAGE, is_random
from fpipe.graph.sources import Source, StateLeaf


def assign(nodes: Sequence[fx.Node], sources: Mapping[str, Source]) -> dict[fx.Node, int]:
    """The stage of each node that has one; what depends on one kind of argument alone has none.

    Args:
        nodes: of the forward, in order; they bear the marks of the stages.
        sources: where each placeholder comes from.
    """
    stage_of: dict[fx.Node, int] = {}
    kinds: dict[fx.Node, set[type]] = {}
    for node in nodes:
        if node.op == "placeholder":
            kinds[node] = {type(sources[node.name])}
            continue
        kinds[node] = set().union(*(kinds[n] for n in node.all_input_nodes))
        settled = any(n in stage_of for n in node.all_input_nodes)
        if settled or len(kinds[node]) > 1 or is_random(node):
            stage_of[node] = node.meta.get(STAGE, 0)
        if node.target is operator.getitem and node.all_input_nodes[0] in stage_of:
            # An element of an op that returns several goes with the op.
            stage_of[node] = stage_of[node.all_input_nodes[0]]
    return stage_of


def homes(
    results: Sequence[fx.Node],
    live: Sequence[fx.Node],
    stage_of: Mapping[fx.Node, int],
    sources: Mapping[str, Source],
    last: int,
) -> list[int]:
    """The stage that returns each result, also of those that belong to no stage.

    One that depends on the state alone comes from the stage that reads that state, and one that
    depends on no stage, such as a leaf of the batch, from the last.
    """
    reader: dict[fx.Node, int] = {}
    for node in live:
        for root in roots_of(node, stage_of) if node in stage_of else ():
            if isinstance(sources.get(root.name), StateLeaf):
                reader[root] = stage_of[node]

    def home(result: fx.Node) -> int:
        if result in stage_of:
            return stage_of[result]
        return next((reader[root] for root in roots_of(result, stage_of) if root in reader), last)

    return [home(result) for result in results]


def roots_of(node: fx.Node, stage_of: Mapping[fx.Node, int]) -> list[fx.Node]:
    """The placeholders that a node reads by itself, and not from another stage's work."""
    found: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in found:
            found[current] = None
            stack += [n for n in current.all_input_nodes if n not in stage_of]
    return [n for n in found if n.op == "placeholder"]
