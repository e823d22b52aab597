"""Divide a recorded function with its backward into the stages between its cuts.

    one joint graph ──► a graph for each stage, forward and backward, and what crosses between them

Forward values cross to the later stages that read them; a gradient crosses back from each stage
that a value went to. What crosses is laid out densely: with its dimensions in the order of its
memory, so that the reader gets back the very strides that it was recorded with.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fpipe.checks.explain import Untraceable
from fpipe.divide.assigning import Backward, assign, homes, is_forward
from fpipe.graph.joint import Cotangent, Source, Upstream
from fpipe.graph.layouts import memory_order
from fpipe.graph.nodes import TURN, ancestors, is_random, is_view, value_of
from fpipe.torch_internals import FakeTensorMode
from fpipe.trace.labels import Edge, Labels, Turn

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Part:
    """What one stage runs.

    Attributes:
        graph: returns two lists, outputs and gradients.
        sources: where the value of each placeholder that is no cotangent comes from.
        cotangents: for each output what its readers hand back.
        owed: what each gradient is by.
        is_stale: some inputs have other strides than in the recording, so `propagate` must compute
            those of all values again.
    """

    graph: fx.Graph
    sources: dict[str, Source]
    cotangents: list[list[Cotangent]]
    owed: tuple[Source, ...]
    is_stale: bool


class Divided(NamedTuple):
    """The stages of a function.

    Attributes:
        parts: one per stage.
        results: where each result comes from.
    """

    parts: tuple[Part, ...]
    results: tuple[Upstream, ...]


def divide(
    graph: fx.Graph,
    labels: Labels,
    sources: Mapping[str, Source],
    owed: Sequence[Source],
    mode: FakeTensorMode,
    *,
    last: int,
    heads: int,
    seed: fx.Node | None,
) -> Divided:
    """Divide a graph that was recorded under `labels`.

    Args:
        graph: returns two lists: results, the loss first, and gradients.
        labels: says where each node belongs.
        sources: where each placeholder comes from, but for the seed.
        owed: what each gradient is by.
        mode: the fake-tensor mode of the graph's values.
        last: the number of the last stage.
        heads: how many of the first results come from the last stage, wherever they are computed.
        seed: the placeholder of the cotangent of the loss; None for a forward alone.

    Raises:
        Untraceable: a hook uses a gradient where autograd does not bring it.
    """
    return _Division(graph, labels, sources, owed, mode, last, heads, seed)()


class _Output(NamedTuple):
    """An output of a stage: a value that crosses to others, or a result as it is."""

    node: fx.Node
    crosses: bool


@dataclass
class _Stage:
    """What a stage needs, and then what it is made of.

    Attributes:
        arguments: the placeholders of the whole graph that it reads.
        crossing: the values of earlier stages that it reads, each with its stage.
        nodes: what it computes.
        totals: the edges whose gradients it adds up, which come in from these stages.
        outputs: what it puts out.
        hands: the edges along which it hands gradients to other stages.
    """

    arguments: dict[fx.Node, None] = field(default_factory=dict)
    crossing: dict[fx.Node, int] = field(default_factory=dict)
    nodes: dict[fx.Node, None] = field(default_factory=dict)
    totals: dict[Edge, list[int]] = field(default_factory=dict)
    outputs: dict[_Output, None] = field(default_factory=dict)
    hands: dict[Edge, None] = field(default_factory=dict)


class _Division:
    def __init__(
        self,
        graph: fx.Graph,
        labels: Labels,
        sources: Mapping[str, Source],
        owed: Sequence[Source],
        mode: FakeTensorMode,
        last: int,
        heads: int,
        seed: fx.Node | None,
    ) -> None:
        self._graph, self._sources, self._mode = graph, sources, mode
        self._last, self._seed = last, seed
        _look_at_whole(graph)
        self._nodes = [node for node in graph.nodes if node.op != "output"]
        self._constants = _constants(self._nodes)
        forward = [n for n in self._nodes if is_forward(n) and n is not seed]
        self._stage_of = assign(forward, sources)
        self._backward = Backward(labels, self._nodes, self._stage_of, seed, last)
        returned: Any = graph.output_node().args[0]
        self._results, self._gradients = returned
        found = ancestors(self._results)
        live = [node for node in forward if node in found]
        self._homes = [last] * heads + homes(
            self._results[heads:], live, self._stage_of, sources, last
        )
        # A stage that reads one of these owes a gradient by it, zeros where nothing comes back.
        places = {sources[node.name]: node for node in forward if node.op == "placeholder"}
        owing = owed if self._gradients else ()
        self._trained = [(source, value_of(places[source])) for source in owing]
        # Nothing was differentiated if the loss depends on nothing that is owed a gradient.
        triples = zip(owed, labels.leaves, self._gradients, strict=True) if labels.leaves else ()
        self._leaves = list(triples)
        self._stages = [_Stage() for _ in range(last + 1)]
        self._waiting: list[tuple[fx.Node, Turn | None, int]] = []  # what is read, by whom
        # Along which edges gradients come back to a stage from others; each is an output of it.
        self._back: list[dict[Edge, list[int]]] = [{} for _ in range(last + 1)]
        self._owed: list[list[tuple[Source, Edge, fx.Node]]] = [[] for _ in range(last + 1)]

    def __call__(self) -> Divided:
        self._demand()
        leaves = [
            {output: number for number, output in enumerate(stage.outputs)}
            for stage in self._stages
        ]
        origins = [
            {
                edge: Upstream(stage, len(leaves[stage]) + number)
                for number, edge in enumerate(self._back[stage])
            }
            for stage in range(self._last + 1)
        ]
        parts = tuple(
            _Build(self, stage, leaves, origins).part() for stage in range(self._last + 1)
        )
        results = tuple(
            Upstream(home, leaves[home][_Output(node, False)])
            for node, home in zip(self._results, self._homes, strict=True)
        )
        return Divided(parts, results)

    # ── what each stage needs ───────────────────────────────────────────────────────────────────

    def _demand(self) -> None:
        """Follow what is returned back to where it comes from."""
        for node, home in zip(self._results, self._homes, strict=True):
            self._stages[home].outputs[_Output(node, False)] = None
            self._waiting.append((node, None, home))
        for source, edge, gradient in self._leaves:
            givers = self._backward.givers(edge)
            hooked = bool(givers) and self._backward.totals[edge] is not gradient
            if hooked and len(givers) > 1:
                raise Untraceable(
                    "registers a hook on a tensor that several stages read",
                    "each of them has a part of its gradient: register it on what one of them "
                    "makes of it",
                )
            for stage in sorted(givers):
                self._owed[stage].append((source, edge, gradient))
                if hooked:
                    self._waiting.append((gradient, Turn(edge.node), stage))
                else:
                    self._total(edge, stage)
        while self._waiting:
            self._read(*self._waiting.pop())

    def _read(self, node: fx.Node, reader: Turn | None, stage: int) -> None:
        """A stage reads a value."""
        own, kind = self._stages[stage], self.kind(node, reader, stage)
        if isinstance(kind, Edge):
            self._total(kind, stage)
        elif kind == "argument":
            own.arguments[node] = None
        elif kind == "crossing":
            home = self._stage_of[node]
            own.crossing[node] = home
            self._stages[home].outputs[_Output(node, True)] = None
            self._compute(node, home)
        else:
            self._compute(node, stage)

    def _compute(self, node: fx.Node, stage: int) -> None:
        nodes = self._stages[stage].nodes
        if node not in nodes:
            nodes[node] = None
            reader = node.meta.get(TURN)
            self._waiting += [(used, reader, stage) for used in node.all_input_nodes]

    def _total(self, edge: Edge, stage: int) -> None:
        """A stage reads the sum of the gradients that come along an edge."""
        totals = self._stages[stage].totals
        if edge in totals:
            return
        givers = self._backward.givers(edge)
        if self._backward.home(edge.node) is None:
            givers &= {stage}
        totals[edge] = sorted(givers - {stage}, reverse=True)
        if totals[edge]:
            self._back[stage][edge] = totals[edge]
        for giver in givers:
            if giver != stage:
                self._stages[giver].hands[edge] = None
            self._waiting += [
                (value, Turn(number), giver) for number, value in self._backward.given(edge, giver)
            ]

    def kind(self, node: fx.Node, reader: Turn | None, stage: int) -> str | Edge:
        """How a stage comes by a value that one of its nodes reads.

        Returns:
            ``"argument"``, ``"crossing"``, ``"own"``, or the edge along which it is a gradient.
        """
        if node is self._seed:
            if stage == self._last:
                return "argument"
        elif node.op == "placeholder":
            return "argument"
        elif is_forward(node):
            home = self._stage_of.get(node, stage)
            if home <= stage:
                return "own" if home == stage else "crossing"
        else:
            turn: Turn = node.meta[TURN]
            if reader is not None and turn.node == reader.node and not turn.adding:
                return "own"
        edge = None if reader is None else self._backward.entering.get((node, reader.node))
        if edge is None and node in self._constants:
            return "own"
        if edge is None:
            raise Untraceable(
                "has a backward that uses what another stage makes",
                "a hook, or the backward of a torch.autograd.Function, may use what it is given "
                "and what was saved for it; do not keep gradients or values elsewhere",
            )
        return edge


class _Build:
    """Builds the graph of one stage."""

    def __init__(
        self,
        division: _Division,
        stage: int,
        leaves: Sequence[Mapping[_Output, int]],
        origins: Sequence[Mapping[Edge, Upstream]],
    ) -> None:
        self._division, self._stage = division, stage
        self._need = division._stages[stage]
        self._leaves, self._origins = leaves, origins
        self._backward = division._backward
        self.graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._crossed: dict[fx.Node, fx.Node] = {}
        self._names: dict[tuple[Edge, int], str] = {}  # of the placeholders of cotangents
        self._given: dict[tuple[Edge, int], fx.Node] = {}
        self._sums: dict[Edge, fx.Node] = {}
        self._sources: dict[str, Source] = {}
        self._is_stale = False

    def part(self) -> Part:
        division, need = self._division, self._need
        seed = self._place_arguments()
        for node in division._nodes:
            if node in need.nodes:
                read = partial(self._value, reader=node.meta.get(TURN))
                self._copies[node] = self.graph.node_copy(node, read)
        outputs = [
            self._sent(self._copies[node], value_of(node)) if crosses else self._value(node, None)
            for node, crosses in need.outputs
        ]
        back = division._back[self._stage]
        cotangents: list[list[Cotangent]] = [[] for _ in outputs]
        for edge, givers in back.items():
            # The edge needs an output to hang its cotangent on: any value, for nobody reads it.
            outputs.append(outputs[0] if outputs else self._anything())
            cotangents.append(
                [Cotangent(giver, self._names[edge, giver]) for giver in sorted(givers)]
            )
        if seed is not None:
            loss = _Output(division._results[0], False)
            leaf = self._leaves[self._stage][loss]
            cotangents[leaf].append(Cotangent(division._last + 1, seed.name))
        owed: list[Source] = []
        gradients: list[fx.Node] = []
        for source, edge, gradient in division._owed[self._stage]:
            owed.append(source)
            if self._backward.totals[edge] is gradient:
                gradients.append(self._total(edge))
            else:
                gradients.append(self._value(gradient, Turn(edge.node)))
        for source, like in division._trained:
            if source in self._sources.values() and source not in owed:
                owed.append(source)
                gradients.append(self._zeros(like))
        for edge in need.hands:
            home = self._backward.home(edge.node)
            assert home is not None
            owed.append(self._origins[home][edge])
            value = self._added([*self._parts(edge, self._stage)], edge)
            gradients.append(self._sent(value, value_of(self._backward.totals[edge])))
        self.graph.output((outputs, gradients))
        return Part(self.graph, self._sources, cotangents, tuple(owed), self._is_stale)

    def _place_arguments(self) -> fx.Node | None:
        """Placeholders first; returns that of the seed."""
        division, need = self._division, self._need
        seed = None
        received: list[tuple[fx.Node, Tensor, Any]] = []
        for node in division._nodes:
            if node in need.arguments:
                copy = self.graph.placeholder(node.name)
                copy.meta |= node.meta
                self._copies[node] = copy
                if node is division._seed:
                    seed = copy
                else:
                    self._sources[copy.name] = division._sources[node.name]
        for node in division._nodes:
            if node in need.crossing:
                home = need.crossing[node]
                copy = self._received(node.name, value_of(node))
                leaf = self._leaves[home][_Output(node, True)]
                self._sources[copy.name] = Upstream(home, leaf)
                received.append((copy, value_of(node), node))
        for edge, givers in division._back[self._stage].items():
            like = value_of(self._backward.totals[edge])
            for giver in givers:
                copy = self._received(f"cotangent_{len(self._names)}", like)
                self._names[edge, giver] = copy.name
                received.append((copy, like, (edge, giver)))
        for copy, like, what in received:
            value = self._as_recorded(copy, like)
            if isinstance(what, fx.Node):
                self._crossed[what] = value
            else:
                self._given[what] = value
        return seed

    def _received(self, name: str, like: Tensor) -> fx.Node:
        order = _order(like)
        shape = like.shape if order is None else [like.shape[dim] for dim in order]
        node = self.graph.placeholder(name)
        with self._division._mode:
            node.meta["val"] = torch.empty(shape, dtype=like.dtype, device=like.device)
        return node

    def _as_recorded(self, node: fx.Node, like: Tensor) -> fx.Node:
        """What came in, with its dimensions where they were when it was recorded."""
        order = _order(like)
        if order is None:
            self._is_stale = True
            return node
        if order == sorted(order):
            return node
        return self._permuted(node, sorted(order, key=order.__getitem__))

    def _sent(self, node: fx.Node, like: Tensor) -> fx.Node:
        """A value as it goes to another stage: dense, and in the order of memory."""
        order = _order(like)
        if order is None:
            return self._called(aten.clone.default, _made_plain(self, node))
        return node if order == sorted(order) else self._permuted(node, order)

    def _permuted(self, node: fx.Node, order: list[int]) -> fx.Node:
        return self._called(aten.permute.default, node, order)

    def _called(self, target: Any, *arguments: Any, **options: Any) -> fx.Node:
        made = self.graph.call_function(target, arguments, options)
        values = fx.map_arg(arguments, value_of)
        with self._division._mode, torch.no_grad():
            made.meta["val"] = target(*values, **options)
        return made

    def _value(self, node: fx.Node, reader: Turn | None) -> fx.Node:
        kind = self._division.kind(node, reader, self._stage)
        if isinstance(kind, Edge):
            return self._total(kind)
        return self._crossed[node] if kind == "crossing" else self._copies[node]

    def _total(self, edge: Edge) -> fx.Node:
        """The sum of the gradients along an edge: those of later stages, then this stage's own."""
        if edge not in self._sums:
            givers = self._need.totals[edge]
            parts = [self._given[edge, giver] for giver in givers]
            self._sums[edge] = self._added([*parts, *self._parts(edge, self._stage)], edge)
        return self._sums[edge]

    def _parts(self, edge: Edge, stage: int) -> list[fx.Node]:
        return [self._value(v, Turn(number)) for number, v in self._backward.given(edge, stage)]

    def _added(self, parts: list[fx.Node], edge: Edge) -> fx.Node:
        like = value_of(self._backward.totals[edge])
        if not parts:
            return self._zeros(like)
        total = parts[0]
        for part in parts[1:]:
            total = self._called(aten.add.Tensor, total, part)
        return total

    def _zeros(self, like: Tensor) -> fx.Node:
        place = {"dtype": like.dtype, "device": like.device}
        return self._called(aten.full.default, list(like.shape), 0, **place)

    def _anything(self) -> fx.Node:
        """Any value of the stage."""
        return next(reversed(self._copies.values()))


def _constants(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """What depends on what the function closes over alone: any stage can make it."""
    found: set[fx.Node] = set()
    for node in nodes:
        made = node.op == "call_function" and not is_random(node)
        if node.op == "get_attr" or (made and all(n in found for n in node.all_input_nodes)):
            found.add(node)
    return found


def _look_at_whole(graph: fx.Graph) -> None:
    """Take each as_strided of the tensor that owns the memory: a view of it crosses densely."""
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        value, *place = node.args
        if value_of(value).is_conj() or value_of(value).is_neg():
            continue
        offset = place[2] if len(place) > 2 else None
        if offset is None:
            offset = value_of(value).storage_offset()
        base = value
        while is_view(base):
            looked_at = base.all_input_nodes[0]
            if base.target is operator.getitem:  # of an operation that returns several views
                looked_at = looked_at.all_input_nodes[0]
            same_turn = looked_at.meta.get(TURN) == node.meta.get(TURN)
            if not same_turn or value_of(looked_at).dtype != value_of(value).dtype:
                break
            base = looked_at
        node.args = (base, *place[:2], offset)


def _made_plain(build: _Build, node: fx.Node) -> fx.Node:
    """A value whose conjugation or negation is not put off any more."""
    value = value_of(node)
    if value.is_conj():
        node = build._called(aten.resolve_conj.default, node)
    return build._called(aten.resolve_neg.default, node) if value.is_neg() else node


def _order(value: Tensor) -> list[int] | None:
    """The dimensions of a value in the order of its memory; None if it does not lie densely."""
    if value.layout is not torch.strided:
        raise Untraceable(
            f"passes a tensor in layout {value.layout} from one stage to another",
            "only dense tensors travel: call .to_dense(), or make it where it is read",
        )
    if value.is_conj() or value.is_neg():
        return None
    order = memory_order(value.shape, value.stride())
    return order if value.permute(order).is_contiguous() else None
