"""A piece of a stage: the part of its joint graph that runs at once, and how it is cut out.

Every piece is a backward slice: walk from what it must return towards the placeholders, and stop
at values that some earlier piece has made available.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from fpipe.graph.fingerprint import fingerprint, places_of
from fpipe.graph.nodes import ancestors
from fpipe.pieces.footprint import footprint

aten = torch.ops.aten

PREPARE = "P"
"""The piece that computes what no microbatch goes into, once a step."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a joint graph that runs at once.

    Attributes:
        inputs: names of the values it reads.
        outputs: names of the values it returns.
        graph: placeholders for `inputs`, in order, and one tuple of `outputs`.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    graph: fx.Graph
    _footprints: dict[tuple[frozenset[int], bool], int] = field(default_factory=dict, repr=False)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for pieces that compute the same, on whatever devices, among whatever processes."""
        return fingerprint(self.graph)

    @cached_property
    def places(self) -> tuple[torch.device | str, ...]:
        """The devices and process groups that its graph names."""
        return places_of(self.graph)

    @property
    def communicates(self) -> bool:
        """Whether it has collectives."""
        return any(isinstance(place, str) for place in self.places)

    def footprint(self, handed: frozenset[int], *, fuses: bool) -> int:
        """Bytes that a call needs beyond what is held when it starts; see `footprint`."""
        if (handed, fuses) not in self._footprints:
            self._footprints[handed, fuses] = footprint(self.graph, handed, fuses=fuses)
        return self._footprints[handed, fuses]


def piece_of(
    roots: Iterable[fx.Node],
    available: Collection[fx.Node],
    checks: Sequence[fx.Node],
    late: Collection[fx.Node] = (),
) -> Piece | None:
    """The piece that computes those of `roots` that are not available; None if nothing is to do.

    Args:
        roots: what it returns.
        available: values that it can read.
        checks: ops that it runs too, which return nothing and raise if something is wrong.
        late: what is computed when it is first read, and not in the order of the graph.
    """
    returned = [n for n in dict.fromkeys(roots) if n not in available]
    if not returned and not checks:
        return None
    nodes = sliced([*returned, *checks], available)
    if late:
        nodes = _when_read(nodes, late)
    inputs = reads_of(nodes)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {"val": node.meta["val"]}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        copies[node].meta = {"val": node.meta.get("val")}
    graph.output(tuple(_in_memory(graph, copies[node]) for node in returned))
    return Piece(tuple(n.name for n in inputs), tuple(n.name for n in returned), graph)


def _in_memory(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A value that is returned, with nothing in it that is yet to be conjugated or negated.

    Whoever reads it, a kernel or another process, reads memory.
    """
    for resolve, is_pending in (
        (aten.resolve_conj.default, torch.is_conj),
        (aten.resolve_neg.default, torch.is_neg),
    ):
        value = node.meta["val"]
        if is_pending(value):
            node = graph.call_function(resolve, (node,))
            node.meta = {"val": resolve(value)}
    return node


def sliced(roots: Collection[fx.Node], available: Collection[fx.Node]) -> list[fx.Node]:
    """The nodes that must run to compute `roots` when `available` need not, in graph order."""
    found = ancestors(roots, until=available)
    if not found:
        return []
    graph = next(iter(found)).graph
    return [node for node in graph.nodes if node in found]


def _when_read(nodes: list[fx.Node], late: Collection[fx.Node]) -> list[fx.Node]:
    """Nodes in graph order, but for those that are `late`, each just before it is first read."""
    place = {node: index for index, node in enumerate(nodes)}
    order: dict[fx.Node, None] = {}
    for node in nodes:
        if node not in late:
            wanted: set[fx.Node] = set()
            stack = [node]
            while stack:
                current = stack.pop()
                if current in place and current not in order and current not in wanted:
                    wanted.add(current)
                    stack += current.all_input_nodes
            order |= dict.fromkeys(sorted(wanted, key=place.__getitem__))
    return list(order | dict.fromkeys(nodes))


def reads_of(nodes: Collection[fx.Node]) -> list[fx.Node]:
    """The values that `nodes` read and do not compute."""
    inside = set(nodes)
    read = (n for node in nodes for n in node.all_input_nodes if n not in inside)
    return list(dict.fromkeys(read))
