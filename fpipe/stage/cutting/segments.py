"""The functions between the cuts of a recorded one.

Work belongs to the stage in which it was recorded, except that what depends on parameters alone, or
on the batch alone, is done by whoever reads it.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from fpipe.stage.graphs.nodes import STAGE, ancestors, is_random
from fpipe.stage.graphs.sources import Source, StateLeaf, Upstream


@dataclass(frozen=True, eq=False)
class Segment:
    """The part of a graph that one stage runs.

    Attributes:
        graph: placeholders for `sources`, in order; returns a list of its outputs.
        sources: where each input comes from.
        readers: for each output, the stages that read it, and one that stands behind the last for
            the loss.
    """

    graph: fx.Graph
    sources: tuple[Source, ...]
    readers: tuple[tuple[int, ...], ...]

    @property
    def returned(self) -> tuple[Tensor, ...]:
        """Its outputs, abstract, where they were recorded."""
        nodes: Any = self.graph.output_node().args[0]
        return tuple(node.meta["val"] for node in nodes)


def mark(graph: fx.Graph, marks: Sequence[int]) -> None:
    """Note at each node of a graph that has just been recorded in which stage that was.

    Args:
        graph: its nodes are as they were recorded. Nodes that replace others take their mark.
        marks: how many nodes there were at each cut.
    """
    for number, node in enumerate(graph.nodes):
        node.meta[STAGE] = sum(mark <= number for mark in marks)


def segments(
    graph: fx.Graph, last: int, sources: dict[str, Source], heads: int = 1
) -> tuple[tuple[Segment, ...], tuple[Upstream, ...]]:
    """Divide a recorded forward graph at its cuts.

    Args:
        graph: returns a list of nodes, the loss first; they bear the marks of `mark`.
        last: the number of the last stage.
        sources: where each placeholder comes from.
        heads: how many of the first results come from the last stage, wherever they are computed.

    Returns:
        The segments, and where each result comes from: one that depends on the state alone from the
        stage that reads that state, and one that depends on no stage, such as a leaf of the batch,
        from the last.
    """
    results: Any = graph.output_node().args[0]
    stage_of = _assign(graph, sources)
    live = _needed(results)
    readers: dict[fx.Node, set[int]] = defaultdict(set)
    for node in live:
        for used in node.all_input_nodes:
            if node in stage_of and used in stage_of and stage_of[used] != stage_of[node]:
                readers[used].add(stage_of[node])
    for head in results[:heads]:
        if stage_of.get(head, last) != last:
            readers[head].add(last)
    homes = [last] * heads + _homes(results[heads:], live, stage_of, sources, last)
    returned = set(zip(results, homes, strict=True))
    made: dict[tuple[fx.Node, int], Upstream] = {}
    origin: dict[fx.Node, Source] = {}
    built = []
    for stage in range(last + 1):
        outputs = [
            n for n in live if (n in readers and stage_of[n] == stage) or (n, stage) in returned
        ]
        handed = [tuple(sorted(readers[n])) if stage_of.get(n) == stage else () for n in outputs]
        if stage == last:
            # What differentiates the loss stands behind the last stage.
            handed[outputs.index(results[0])] = (last + 1,)
        built.append(_build(outputs, handed, stage, stage_of, origin, sources))
        for leaf, node in enumerate(outputs):
            made[node, stage] = Upstream(stage, leaf)
            origin.setdefault(node, made[node, stage])
    return tuple(built), tuple(made[pair] for pair in zip(results, homes, strict=True))


def _homes(
    results: Sequence[fx.Node],
    live: Sequence[fx.Node],
    stage_of: dict[fx.Node, int],
    sources: dict[str, Source],
    last: int,
) -> list[int]:
    """The stage that returns each result, also of those that belong to no stage."""
    reader: dict[fx.Node, int] = {}
    for node in live:
        for root in _roots(node, stage_of) if node in stage_of else ():
            if isinstance(sources.get(root.name), StateLeaf):
                reader[root] = stage_of[node]

    def home(result: fx.Node) -> int:
        if result in stage_of:
            return stage_of[result]
        return next((reader[root] for root in _roots(result, stage_of) if root in reader), last)

    return [home(result) for result in results]


def _roots(node: fx.Node, stage_of: dict[fx.Node, int]) -> list[fx.Node]:
    """The placeholders that a node reads by itself, and not from another stage's work."""
    found: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in found:
            found[current] = None
            stack += [n for n in current.all_input_nodes if n not in stage_of]
    return [n for n in found if n.op == "placeholder"]


def _assign(graph: fx.Graph, sources: dict[str, Source]) -> dict[fx.Node, int]:
    """The stage of each node that has one; what depends on one kind of argument alone has none."""
    stage_of: dict[fx.Node, int] = {}
    kinds: dict[fx.Node, set[type]] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            kinds[node] = {type(sources[node.name])}
            continue
        kinds[node] = set().union(*(kinds[n] for n in node.all_input_nodes))
        settled = any(n in stage_of for n in node.all_input_nodes)
        if settled or len(kinds[node]) > 1 or is_random(node):
            stage_of[node] = node.meta[STAGE]
        if node.target is operator.getitem and node.all_input_nodes[0] in stage_of:
            # An element of an op that returns several goes with the op.
            stage_of[node] = stage_of[node.all_input_nodes[0]]
    return stage_of


def _needed(results: Sequence[fx.Node]) -> list[fx.Node]:
    """What `results` depend on, and themselves, in graph order."""
    found = ancestors(results)
    return [node for node in results[0].graph.nodes if node in found]


def _build(
    outputs: Sequence[fx.Node],
    readers: Sequence[tuple[int, ...]],
    stage: int,
    stage_of: dict[fx.Node, int],
    made: dict[fx.Node, Source],
    sources: dict[str, Source],
) -> Segment:
    """The graph of one stage: its own nodes, and copies of those that belong to their readers."""
    inside: set[fx.Node] = set()
    edge: dict[fx.Node, Source] = {}
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node.op == "placeholder":
            edge[node] = sources[node.name]
        elif stage_of.get(node, stage) != stage:
            edge[node] = made[node]
        elif node not in inside:
            inside.add(node)
            stack.extend(node.all_input_nodes)
    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in edge:
        copies[node] = copy.placeholder(node.name)
        copies[node].meta |= node.meta
    for node in outputs and outputs[0].graph.nodes:
        if node in inside:
            copies[node] = copy.node_copy(node, lambda n: copies[n])
    copy.output([copies[node] for node in outputs])
    return Segment(copy, tuple(edge.values()), tuple(readers))
