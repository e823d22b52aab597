"""Divide a piece where its layers meet, so that layers that are alike are compiled once.

    F of six layers, one graph            ──►  embed │ layer │ layer │ … │ layer │ head
                                                         └─ one artefact for all of them

A graph in topological order may be cut anywhere: a region reads what those before it return. So
where to cut is a matter of cost alone, and whether two regions are the same is left to their
fingerprints. Layers that are alike show as a stretch of nodes that repeats with a period. It is cut
where the fewest values cross.

A view never crosses: the region that reads it takes the memory that it looks at, and looks again.
So views have no place of their own. A stretch without a matrix product (or what else comes from a
library) is not cut: it is a loop or two, which would become many.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

from torch import fx

from fpipe.graph.nodes import base_of, is_product, is_view, values_of
from fpipe.pieces.piece import Piece, piece_of, sliced

SMALLEST: Final = 4
"""Operations of a region, whose call costs a microsecond or two. Smaller layers share one."""

FEW: Final = 24
"""Operations of a piece below which it is compiled whole in about the time of its parts."""

WORTH: Final = 0.8
"""The share of its nodes that a divided piece may have left to compile."""

_KEY: Final = 2
"""Most integers that are computed apart, as the words of a key are."""

_CANDIDATES: Final = 32
"""How many periods are tried, those that most nodes repeat with."""


def divide(piece: Piece) -> tuple[Piece, ...]:
    """The regions of a piece, in the order in which they run; itself alone where none repeats.

    Their inputs and outputs have the names of the nodes of the piece's graph.
    """
    nodes = _in_order(piece.graph)
    # The result of a collective is not there before another node has waited for it.
    if len(nodes) < FEW or piece.communicates:
        return (piece,)
    borders = sorted(_borders(_Sequence.of(nodes), 0, len(nodes)))
    regions = _cut(piece, nodes, borders)
    sizes = {region.fingerprint: len(region.graph.nodes) for region in regions}
    whole = sum(len(region.graph.nodes) for region in regions)
    return regions if sum(sizes.values()) <= WORTH * whole else (piece,)


def names_of(piece: Piece) -> tuple[list[str], list[str]]:
    """The inputs and outputs of a piece by the names that its regions know."""
    end: Any = piece.graph.output_node().args[0]
    inputs = piece.graph.find_nodes(op="placeholder")
    return [node.name for node in inputs], [node.name for node in end]


def _in_order(graph: fx.Graph) -> list[fx.Node]:
    """The operations of a graph in topological order, without views.

    Keys come first: layers fold their numbers into one, by which they would differ.
    """
    nodes = [n for n in graph.nodes if n.op == "call_function" and not is_view(n)]
    keys: dict[fx.Node, None] = {}
    for node in nodes:
        sources = map(base_of, node.all_input_nodes)
        small = all(v.numel() <= _KEY and not v.is_floating_point() for v in values_of(node))
        if small and all(n in keys or n.op == "placeholder" for n in sources):
            keys[node] = None
    return [*keys, *(node for node in nodes if node not in keys)]


# ── where ───────────────────────────────────────────────────────────────────────────────────────


class _Sequence(NamedTuple):
    """The nodes of a graph, one after the other, without views.

    Attributes:
        kinds: equal for nodes that do the same on the same kind of values.
        readers: of each node the number of the last that reads it, greater than any if the piece
            returns it.
        products: how many products there are before each node, and in all.
    """

    kinds: Sequence[str]
    readers: Sequence[int]
    products: Sequence[int]

    @classmethod
    def of(cls, nodes: Sequence[fx.Node]) -> _Sequence:
        last = {node: index for index, node in enumerate(nodes)}
        for index, node in enumerate([*nodes, nodes[0].graph.output_node()]):
            last |= dict.fromkeys(map(base_of, node.all_input_nodes), index)
        products = accumulate(map(is_product, nodes), initial=0)
        return cls([_kind(node) for node in nodes], [last[node] for node in nodes], list(products))

    def crossing(self, until: int) -> list[int]:
        """For each place how many values cross it that nobody reads from `until` on."""
        change = [0] * (len(self.readers) + 2)
        for index, end in enumerate(self.readers):
            if end < until:
                change[index + 1] += 1
                change[end + 1] -= 1
        return list(accumulate(change))


class _Run(NamedTuple):
    """Regions in a row that look alike: `times` of them, `period` nodes each, from `start` on."""

    start: int
    period: int
    times: int

    @property
    def saved(self) -> int:
        """Nodes that need not be compiled."""
        return (self.times - 1) * self.period

    def places(self) -> range:
        """Where its regions meet, both ends among them."""
        return range(self.start, self.start + self.times * self.period + 1, self.period)


def _borders(sequence: _Sequence, low: int, high: int) -> set[int]:
    """The places at which to cut the nodes from `low` to `high`."""
    run = _longest(sequence, low, high)
    if run is None:
        return set()
    run = _in_phase(sequence, run, high)
    places = run.places()
    inner = _borders(sequence, places[0], places[1])
    repeated = {at + place - places[0] for at in inner for place in places[:-1]}
    beside = _borders(sequence, low, places[0]) | _borders(sequence, places[-1], high)
    return {*places, *repeated, *beside} - {low, high}


def _longest(sequence: _Sequence, low: int, high: int) -> _Run | None:
    """The run by which the most nodes are saved, as early as it can begin."""
    kinds, products = sequence.kinds, sequence.products
    latest: dict[str, int] = {}
    distances: Counter[int] = Counter()
    for index in range(low, high):
        if kinds[index] in latest:
            distances[index - latest[kinds[index]]] += 1
        latest[kinds[index]] = index
    best: _Run | None = None
    for distance, _ in distances.most_common(_CANDIDATES):
        period = distance * -(-SMALLEST // distance)
        for start, end in _stretches(kinds, distance, low, high):
            run = _Run(start, period, (end - start) // period)
            has_product = products[start] < products[start + period] if run.times > 1 else False
            if has_product and (best is None or run.saved > best.saved):
                best = run
    return best


def _stretches(kinds: Sequence[str], period: int, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Where nodes repeat with a period: the beginning and the end of each stretch."""
    start = low
    for index in range(low, high - period + 1):
        if index == high - period or kinds[index] != kinds[index + period]:
            if index > start:
                yield start, index + period
            start = index + 1


def _in_phase(sequence: _Sequence, run: _Run, high: int) -> _Run:
    """The run moved to where the fewest values cross; of several such places to the same always.

    Another stage has the same layers, with something else before or after them.
    """
    kinds, period, first, last = sequence.kinds, run.period, run.start, run.places()[-1]
    end = last
    while end < high and end - last < period - 1 and kinds[end] == kinds[end - period]:
        end += 1
    leaving, alive = sequence.crossing(end), sequence.crossing(len(kinds) + 1)

    def cost(moved: _Run) -> tuple[Any, ...]:
        places = moved.places()
        at_an_end = places[0] == 0 or places[-1] == len(kinds)
        inside = kinds[places[0] : places[1]]
        # A value that is read far behind, or returned, is in memory wherever the run is cut.
        crossing = (sum(values[place] for place in places) for values in (leaving, alive))
        return next(crossing), not at_an_end, next(crossing), inside

    return min((run._replace(start=first + n) for n in range(end - last + 1)), key=cost)


def _kind(node: fx.Node) -> str:
    """The same for nodes that do the same on the same kind of values, wherever these are made."""
    args = fx.map_arg((node.args, node.kwargs), _looks)
    return f"{node.target} {args} {_looks(node)}"


def _looks(node: fx.Node) -> list[Any]:
    return [(*v.shape, *v.stride(), v.dtype, v.device) for v in values_of(node)]


# ── the cut ─────────────────────────────────────────────────────────────────────────────────────


def _cut(piece: Piece, nodes: Sequence[fx.Node], borders: Sequence[int]) -> tuple[Piece, ...]:
    """The regions between the borders; the piece itself if one would compute what another does."""
    region: dict[fx.Node, int] = {}
    for index, node in enumerate(nodes):
        # The results of an operation with several are where it is.
        is_element = node.target is operator.getitem
        region[node] = (
            region[node.all_input_nodes[0]] if is_element else bisect_right(borders, index)
        )
    returned = set(piece.graph.output_node().all_input_nodes)
    leaving = {
        base
        for node in nodes
        for base in map(base_of, node.all_input_nodes)
        if region.get(base, region[node]) != region[node]
    }
    roots: dict[int, list[fx.Node]] = defaultdict(list)
    checks: dict[int, list[fx.Node]] = defaultdict(list)
    place = {node: index for index, node in enumerate(nodes, 1)}
    passed = 0
    for node in piece.graph.nodes:
        passed = max(passed, place.get(node, 0))
        if node in leaving or node in returned:
            # A view of an input belongs to what comes next.
            roots[region.get(base_of(node), bisect_right(borders, passed))].append(node)
        elif node in region and not node.users:
            checks[region[node]].append(node)
    available = set(piece.graph.find_nodes(op="placeholder"))
    regions: list[Piece] = []
    for number in range(len(borders) + 1):
        inside = sliced([*roots[number], *checks[number]], available)
        if any(region.get(node, number) != number for node in inside):
            return (piece,)
        body = piece_of(roots[number], available, checks[number])
        if body is not None:
            regions.append(body)
        available.update(node for node in roots[number] if node in leaving)
    return tuple(regions)
