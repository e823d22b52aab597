"""A piece of a stage: the part of its joint graph that runs at once, and how it is cut out.

Every piece is a backward slice: walk from what it must return towards the placeholders, and stop
at values that some earlier piece has made available.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fpipe.graph.nodes import (
    COPIES,
    ancestors,
    copy_into,
    fingerprint,
    is_product,
    is_random,
    is_view,
    nbytes_of,
    places_of,
)

aten = torch.ops.aten

PREPARE = "P"
"""The piece that computes what no microbatch goes into, once a step."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a joint graph that runs at once.

    Attributes:
        inputs: names of the values it reads.
        outputs: names of the values it returns.
        _nodes: those of the joint graph that it reads, runs and returns.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    _nodes: tuple[Sequence[fx.Node], Sequence[fx.Node], Sequence[fx.Node]] = field(repr=False)
    _footprints: dict[Any, int] = field(default_factory=dict, repr=False)

    @cached_property
    def graph(self) -> fx.Graph:
        """Placeholders for `inputs`, in order, and one tuple of `outputs`.

        It is built when it is first asked for: a schedule needs some of a stage's pieces alone.
        """
        inputs, nodes, returned = self._nodes
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta["val"] = node.meta["val"]
        for node in nodes:
            copies[node] = copy_into(graph, node, copies.__getitem__)
        graph.output(tuple(_in_memory(graph, copies[node]) for node in returned))
        return graph

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

    def footprint(
        self, handed: frozenset[int], *, fuses: bool, written: frozenset[str] = frozenset()
    ) -> int:
        """Bytes that a call needs beyond what is held when it starts; see `footprint`."""
        key = handed, fuses, written
        if key not in self._footprints:
            self._footprints[key] = footprint(self.graph, handed, fuses=fuses, written=written)
        return self._footprints[key]


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
    names = tuple(n.name for n in inputs), tuple(n.name for n in returned)
    return Piece(*names, (inputs, nodes, returned))


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
    needed = ancestors(roots, until=available)
    if not needed:
        return []
    graph = next(iter(needed)).graph
    return [node for node in graph.nodes if node in needed]


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


def footprint(
    graph: fx.Graph, handed: Collection[int], *, fuses: bool, written: Collection[str] = ()
) -> int:
    """Most bytes that a call holds at one time beyond those that were held when it started.

    Args:
        graph: placeholders, ops, and one tuple of outputs, each with its fake value in
            ``meta["val"]``.
        handed: numbers of the inputs that the call alone holds: each goes after its last read.
        fuses: elementwise values are computed where they are read and take no memory, unless a
            matrix product (or what else comes from a library) or the caller reads them. Otherwise
            every op writes its result.
        written: names of values that are in memory all the same.

    Memory that a library takes for itself, as for the packed operands of a product, is not seen.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> def f(x, y):
        ...     return (x.exp().sin() @ y,)
        >>> graph = make_fx(f, tracing_mode="fake")(torch.ones(8, 8), torch.ones(8, 8)).graph
        >>> footprint(graph, (), fuses=False), footprint(graph, (), fuses=True)
        (512, 512)
        >>> footprint(graph, (0,), fuses=True)  # x is gone once its sine is written
        256
    """
    nodes = list(graph.nodes)
    rests_on = _memory(nodes, fuses, written)
    computed = {
        node
        for node in nodes
        if node.op == "call_function"
        and node.target is not operator.getitem
        and rests_on[node] == _made_by(node)
    }
    last: dict[fx.Node, int] = {}
    for index, node in enumerate(nodes):
        if node.op == "output" or node in computed:
            read = (value for n in node.all_input_nodes for value in rests_on[n])
            last.update(dict.fromkeys(read, index))
    inputs = [node for node in nodes if node.op == "placeholder"]
    others = set(inputs) - {inputs[number] for number in handed}
    ending: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for value, index in last.items():
        if value not in others:
            ending[nodes[index]].append(value)
    held = peak = 0
    for node in nodes:
        if node not in computed:
            continue
        size = nbytes_of(node)
        held += size
        gone = ending[node]
        # Fused code writes over what it reads for the last time, if that is not the caller's.
        if fuses and not is_product(node):
            kept = [n for n in gone if n.op == "placeholder" or n.name in written]
            over = [n for n in gone if n not in kept and nbytes_of(n) == size][:1]
            held -= sum(map(nbytes_of, over))
            gone = [n for n in gone if n not in over]
        peak = max(peak, held)
        unread = size - sum(nbytes_of(value) for value in _made_by(node) if value in last)
        held -= unread + sum(map(nbytes_of, gone))
    return peak


def _memory(
    nodes: Collection[fx.Node], fuses: bool, written: Collection[str]
) -> dict[fx.Node, frozenset[fx.Node]]:
    """For each node, the values that must be in memory for it to be read."""
    memory: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in nodes:
        # One of several values that are computed where they are read.
        is_element = (
            fuses and node.target is operator.getitem and _is_elementwise(node.all_input_nodes[0])
        )
        if node.op == "call_function" and (is_view(node) or is_element):
            memory[node] = memory[node.all_input_nodes[0]]
        elif (
            fuses
            and node.name not in written
            and _is_elementwise(node)
            and all(map(_reads_by_element, node.users))
        ):
            memory[node] = frozenset().union(*(memory[n] for n in node.all_input_nodes))
        else:
            memory[node] = _made_by(node)
    return memory


def _made_by(node: fx.Node) -> frozenset[fx.Node]:
    """The values that an op writes: itself, or its elements if it returns several."""
    elements = [user for user in node.users if user.target is operator.getitem]
    return frozenset(elements or [node])


def _is_elementwise(node: fx.Node) -> bool:
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and (torch.Tag.pointwise in target.tags or target in COPIES)
        and not is_random(node)
    )


def _reads_by_element(node: fx.Node) -> bool:
    """Whether generated code can compute what `node` reads at the place where it reads it."""
    if node.op == "output" or is_product(node):
        return False
    looks = is_view(node) or node.target is operator.getitem
    return not looks or all(map(_reads_by_element, node.users))
