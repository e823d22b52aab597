"""Divide a recorded function with its backward into the stages between its cuts.

    one joint graph ──► a graph for each stage, forward and backward, and what crosses between them

Forward values cross to the later stages that read them; a gradient crosses back from each stage
that a value went to. A value that crosses is laid out densely: with its dimensions in the order of
its memory, so that the reader gets back the very strides that it was recorded with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.checks.explain import Untraceable
from fpipe.divide.demand import Demand, Output
from fpipe.graph.joint import Cotangent, Source, Upstream
from fpipe.graph.nodes import TURN, memory_order, value_of
from fpipe.trace.labels import Edge, Turn

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Segment:
    """The graph that one stage runs, and how it is connected.

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


def divide(demand: Demand) -> tuple[tuple[Segment, ...], tuple[Upstream, ...]]:
    """The stages of a recorded function, and where each of its results comes from.

    Raises:
        Untraceable: a hook uses a gradient where autograd does not bring it.
    """
    leaves = [
        {output: number for number, output in enumerate(stage.outputs)} for stage in demand.stages
    ]
    origins = [
        {
            edge: Upstream(stage, len(leaves[stage]) + number)
            for number, edge in enumerate(demand.back[stage])
        }
        for stage in range(demand.last + 1)
    ]
    segments = tuple(
        _StageBuilder(demand, stage, leaves, origins).build() for stage in range(demand.last + 1)
    )
    results = tuple(
        Upstream(home, leaves[home][Output(node, False)])
        for node, home in zip(demand.results, demand.homes, strict=True)
    )
    return segments, results


class _StageBuilder:
    """Builds the graph of one stage."""

    def __init__(
        self,
        demand: Demand,
        stage: int,
        leaves: Sequence[Mapping[Output, int]],
        origins: Sequence[Mapping[Edge, Upstream]],
    ) -> None:
        self._demand, self._stage = demand, stage
        self._need = demand.stages[stage]
        self._leaves, self._origins = leaves, origins
        self._backward = demand.backward
        self.graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._crossed: dict[fx.Node, fx.Node] = {}
        self._names: dict[tuple[Edge, int], str] = {}  # of the placeholders of cotangents
        self._given: dict[tuple[Edge, int], fx.Node] = {}
        self._sums: dict[Edge, fx.Node] = {}
        self._sources: dict[str, Source] = {}
        self._is_stale = False

    def build(self) -> Segment:
        demand, need = self._demand, self._need
        seed = self._place_arguments()
        for node in demand.nodes:
            if node in need.nodes:
                read = partial(self._value, reader=node.meta.get(TURN))
                self._copies[node] = self.graph.node_copy(node, read)
        outputs = [
            self._sent(self._copies[node], value_of(node)) if crosses else self._value(node, None)
            for node, crosses in need.outputs
        ]
        back = demand.back[self._stage]
        cotangents: list[list[Cotangent]] = [[] for _ in outputs]
        for edge, givers in back.items():
            # The edge needs an output to hang its cotangent on: any value, for nobody reads it.
            outputs.append(outputs[0] if outputs else self._anything())
            cotangents.append(
                [Cotangent(giver, self._names[edge, giver]) for giver in sorted(givers)]
            )
        if seed is not None:
            loss = Output(demand.results[0], False)
            leaf = self._leaves[self._stage][loss]
            cotangents[leaf].append(Cotangent(demand.last + 1, seed.name))
        owed: list[Source] = []
        gradients: list[fx.Node] = []
        for source, edge, gradient in demand.owed[self._stage]:
            owed.append(source)
            if self._backward.totals[edge] is gradient:
                gradients.append(self._total(edge))
            else:
                gradients.append(self._value(gradient, Turn(edge.node)))
        for source, like in demand.trained:
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
        return Segment(self.graph, self._sources, cotangents, tuple(owed), self._is_stale)

    def _place_arguments(self) -> fx.Node | None:
        """Placeholders first; returns that of the seed."""
        demand, need = self._demand, self._need
        seed = None
        received: list[tuple[fx.Node, Tensor, Any]] = []
        for node in demand.nodes:
            if node in need.arguments:
                copy = self.graph.placeholder(node.name)
                copy.meta |= node.meta
                self._copies[node] = copy
                if node is demand.seed:
                    seed = copy
                else:
                    self._sources[copy.name] = demand.sources[node.name]
        for node in demand.nodes:
            if node in need.crossing:
                home = need.crossing[node]
                copy = self._received(node.name, value_of(node))
                leaf = self._leaves[home][Output(node, True)]
                self._sources[copy.name] = Upstream(home, leaf)
                received.append((copy, value_of(node), node))
        for edge, givers in demand.back[self._stage].items():
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
        with self._demand.mode:
            node.meta["val"] = torch.empty(shape, dtype=like.dtype, device=like.device)
        return node

    def _as_recorded(self, node: fx.Node, like: Tensor) -> fx.Node:
        """A received value, with its dimensions where they were when it was recorded."""
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
            return self._called(aten.clone.default, self._resolved(node))
        return node if order == sorted(order) else self._permuted(node, order)

    def _resolved(self, node: fx.Node) -> fx.Node:
        """A value with its lazy conjugation or negation carried out."""
        value = value_of(node)
        if value.is_conj():
            node = self._called(aten.resolve_conj.default, node)
        return self._called(aten.resolve_neg.default, node) if value.is_neg() else node

    def _permuted(self, node: fx.Node, order: list[int]) -> fx.Node:
        return self._called(aten.permute.default, node, order)

    def _called(self, target: Any, *arguments: Any, **options: Any) -> fx.Node:
        node = self.graph.call_function(target, arguments, options)
        values = fx.map_arg(arguments, value_of)
        with self._demand.mode, torch.no_grad():
            node.meta["val"] = target(*values, **options)
        return node

    def _value(self, node: fx.Node, reader: Turn | None) -> fx.Node:
        kind = self._demand.kind(node, reader, self._stage)
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
        return [
            self._value(v, Turn(number)) for number, v in self._backward.handed_from(edge, stage)
        ]

    def _added(self, terms: list[fx.Node], edge: Edge) -> fx.Node:
        like = value_of(self._backward.totals[edge])
        if not terms:
            return self._zeros(like)
        total = terms[0]
        for term in terms[1:]:
            total = self._called(aten.add.Tensor, total, term)
        return total

    def _zeros(self, like: Tensor) -> fx.Node:
        place = {"dtype": like.dtype, "device": like.device}
        return self._called(aten.full.default, list(like.shape), 0, **place)

    def _anything(self) -> fx.Node:
        """Any value of the stage."""
        return next(reversed(self._copies.values()))


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
