"""Find the values that each stage of a recorded function reads, computes and puts out.

Demand goes from the results back to where each value comes from. A value of an earlier stage that
a later one reads crosses; a gradient that stages share crosses back.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from fpipe.checks.explain import Untraceable
from fpipe.divide.assigning import Backward, assign, homes, is_forward
from fpipe.graph.joint import Source
from fpipe.graph.nodes import TURN, ancestors, is_random, is_view, value_of
from fpipe.torch_internals import FakeTensorMode
from fpipe.trace.labels import Edge, Labels, Turn

aten = torch.ops.aten


class Output(NamedTuple):
    """An output of a stage: a value that crosses to others, or a result as it is."""

    node: fx.Node
    crosses: bool


@dataclass
class StageNeeds:
    """The values and gradients that a stage reads, computes and puts out.

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
    outputs: dict[Output, None] = field(default_factory=dict)
    hands: dict[Edge, None] = field(default_factory=dict)


class Demand:
    """The values that each stage reads, computes and puts out.

    Args:
        graph: returns two lists: results, the loss first, and gradients. It was recorded under
            `labels`.
        labels: says where each node belongs.
        sources: where each placeholder comes from, but for the seed.
        owed: what each gradient is by.
        mode: the fake-tensor mode of the graph's values.
        last: the number of the last stage.
        heads: how many of the first results come from the last stage, wherever they are computed.
        seed: the placeholder of the cotangent of the loss; None for a forward alone.

    Attributes:
        nodes: of the whole graph, in order.
        stages: the needs of each stage.
        results, homes: what the function returns, and the stage that each result comes from.
        back: for each stage the edges along which gradients come back from others, and from which;
            each is an output of it.
        owed: for each stage the sources of its gradients, each with its edge and its value.
        trained: what gets a gradient; a stage that reads it without one returns zeros.
    """

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
        self.sources, self.mode = sources, mode
        self.last, self.seed = last, seed
        _look_at_whole(graph)
        self.nodes = [node for node in graph.nodes if node.op != "output"]
        self._constants = _constants(self.nodes)
        forward = [n for n in self.nodes if is_forward(n) and n is not seed]
        self._stage_of = assign(forward, sources)
        self.backward = Backward(labels, self.nodes, self._stage_of, seed, last)
        returned: Any = graph.output_node().args[0]
        self.results, gradients = returned
        needed = ancestors(self.results)
        live = [node for node in forward if node in needed]
        self.homes = [last] * heads + homes(
            self.results[heads:], live, self._stage_of, sources, last
        )
        # A stage that reads one of these owes a gradient by it, zeros where nothing comes back.
        places = {sources[node.name]: node for node in forward if node.op == "placeholder"}
        owing = owed if gradients else ()
        self.trained = [(source, value_of(places[source])) for source in owing]
        # Nothing was differentiated if the loss depends on nothing that is owed a gradient.
        triples = zip(owed, labels.leaves, gradients, strict=True) if labels.leaves else ()
        self._leaves = list(triples)
        self.stages = [StageNeeds() for _ in range(last + 1)]
        self._waiting: list[tuple[fx.Node, Turn | None, int]] = []  # what is read, by whom
        self.back: list[dict[Edge, list[int]]] = [{} for _ in range(last + 1)]
        self.owed: list[list[tuple[Source, Edge, fx.Node]]] = [[] for _ in range(last + 1)]
        self._follow()

    def _follow(self) -> None:
        """Follow what is returned back to where it comes from."""
        for node, home in zip(self.results, self.homes, strict=True):
            self.stages[home].outputs[Output(node, False)] = None
            self._waiting.append((node, None, home))
        for source, edge, gradient in self._leaves:
            givers = self.backward.givers(edge)
            hooked = bool(givers) and self.backward.totals[edge] is not gradient
            if hooked and len(givers) > 1:
                raise Untraceable(
                    "registers a hook on a tensor that several stages read",
                    "each of them has a part of its gradient: register it on what one of them "
                    "makes of it",
                )
            for stage in sorted(givers):
                self.owed[stage].append((source, edge, gradient))
                if hooked:
                    self._waiting.append((gradient, Turn(edge.node), stage))
                else:
                    self._total(edge, stage)
        while self._waiting:
            self._read(*self._waiting.pop())

    def _read(self, node: fx.Node, reader: Turn | None, stage: int) -> None:
        """A stage reads a value."""
        needs, kind = self.stages[stage], self.kind(node, reader, stage)
        if isinstance(kind, Edge):
            self._total(kind, stage)
        elif kind == "argument":
            needs.arguments[node] = None
        elif kind == "crossing":
            home = self._stage_of[node]
            needs.crossing[node] = home
            self.stages[home].outputs[Output(node, True)] = None
            self._compute(node, home)
        else:
            self._compute(node, stage)

    def _compute(self, node: fx.Node, stage: int) -> None:
        nodes = self.stages[stage].nodes
        if node not in nodes:
            nodes[node] = None
            reader = node.meta.get(TURN)
            self._waiting += [(used, reader, stage) for used in node.all_input_nodes]

    def _total(self, edge: Edge, stage: int) -> None:
        """A stage reads the sum of the gradients that come along an edge."""
        totals = self.stages[stage].totals
        if edge in totals:
            return
        givers = self.backward.givers(edge)
        if self.backward.home(edge.node) is None:
            givers &= {stage}
        totals[edge] = sorted(givers - {stage}, reverse=True)
        if totals[edge]:
            self.back[stage][edge] = totals[edge]
        for giver in givers:
            if giver != stage:
                self.stages[giver].hands[edge] = None
            self._waiting += [
                (value, Turn(number), giver)
                for number, value in self.backward.handed_from(edge, giver)
            ]

    def kind(self, node: fx.Node, reader: Turn | None, stage: int) -> str | Edge:
        """How a stage comes by a value that one of its nodes reads.

        Returns:
            ``"argument"``, ``"crossing"``, ``"own"``, or the edge along which it is a gradient.
        """
        if node is self.seed:
            if stage == self.last:
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
        edge = None if reader is None else self.backward.entering.get((node, reader.node))
        if edge is None and node in self._constants:
            return "own"
        if edge is None:
            raise Untraceable(
                "has a backward that uses what another stage makes",
                "a hook, or the backward of a torch.autograd.Function, may use what it is given "
                "and what was saved for it; do not keep gradients or values elsewhere",
            )
        return edge


def _constants(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes that depend only on closed-over tensors: any stage can compute them."""
    constants: set[fx.Node] = set()
    for node in nodes:
        is_computed = node.op == "call_function" and not is_random(node)
        if node.op == "get_attr" or (
            is_computed and all(n in constants for n in node.all_input_nodes)
        ):
            constants.add(node)
    return constants


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
