"""Assign each node of a recorded forward and backward to a stage.

Work belongs to the stage in which it was recorded, except that what depends on parameters alone, or
on the batch alone, is done by whoever reads it.

In the backward autograd's nodes are vertices, and gradients flow along edges from node to node. A
node belongs to the stage in which it was made, except that what is made of parameters alone (or of
the batch alone) belongs to whoever reads it: each reading stage runs that part of the backward on
the gradients that come from itself.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import fx

from fpipe.graph.joint import Source, StateLeaf
from fpipe.graph.nodes import COUNT, STAGE, TURN, is_random, is_view
from fpipe.trace.labels import Edge, Handed, Labels


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
    reached: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in reached:
            reached[current] = None
            stack += [n for n in current.all_input_nodes if n not in stage_of]
    return [n for n in reached if n.op == "placeholder"]


aten = torch.ops.aten


class Backward:
    """The backward of a recorded function.

    Args:
        labels: what was noted while it was recorded.
        nodes: of the graph, in order.
        stage_of: the stage of each node of the forward that has one.
        seed: the placeholder of the cotangent of the loss.
        last: the number of the last stage, which the seed comes to.
    """

    def __init__(
        self,
        labels: Labels,
        nodes: Sequence[fx.Node],
        stage_of: Mapping[fx.Node, int],
        seed: fx.Node | None,
        last: int,
    ) -> None:
        self._labels = labels
        self._stage_of = stage_of
        self._first: dict[int, list[fx.Node]] = defaultdict(list)  # by autograd's counter
        for node in nodes:
            if COUNT in node.meta and node.op == "call_function":
                self._first[node.meta[COUNT]].append(node)
        self._leaves = {edge.node for edge in labels.leaves}
        self.handed: dict[Edge, list[Handed]] = {e: list(h) for e, h in labels.handed.items()}
        if seed is not None and labels.root is not None:
            self.handed.setdefault(labels.root, []).insert(0, Handed(-1, seed))
        self._homes: dict[int, int | None] = {-1: last}
        for number in sorted(range(len(labels.numbers)), key=labels.numbers.__getitem__):
            self._homes[number] = self._home(number)
        self._add_up()
        first = _views_made_again(nodes, self.entering)
        for handed in self.handed.values():
            handed[:] = [
                gradient._replace(value=first.get(gradient.value, gradient.value))
                for gradient in handed
            ]
        self._add_up()
        self._incoming: dict[int, list[Edge]] = defaultdict(list)
        for edge in self.handed:
            self._incoming[edge.node].append(edge)
        self._givers: dict[int, frozenset[int]] = {}

    def _add_up(self) -> None:
        """Find the sum of the gradients along each edge."""
        taken: set[fx.Node] = set()
        self.totals = {
            edge: _total(edge, gradients, taken) for edge, gradients in self.handed.items()
        }
        self.entering = {(total, edge.node): edge for edge, total in self.totals.items()}

    def home(self, number: int) -> int | None:
        """The stage of one of autograd's nodes; None of what belongs to whoever reads it."""
        return self._homes[number]

    def givers(self, edge: Edge) -> frozenset[int]:
        """The stages from which gradients come along an edge."""
        stages: set[int] = set()
        for node, _ in self.handed.get(edge, ()):
            home = self._homes[node]
            stages |= self._running(node) if home is None else {home}
        return frozenset(stages)

    def handed_from(self, edge: Edge, stage: int) -> list[Handed]:
        """The gradients that come along an edge from one stage."""
        return [
            gradient
            for gradient in self.handed.get(edge, ())
            if (self._homes[gradient.node] == stage)
            or (self._homes[gradient.node] is None and stage in self._running(gradient.node))
        ]

    def _running(self, number: int) -> frozenset[int]:
        """The stages that run a node of no stage."""
        if number not in self._givers:
            self._givers[number] = frozenset[int]().union(
                *(self.givers(edge) for edge in self._incoming[number])
            )
        return self._givers[number]

    def _home(self, number: int) -> int | None:
        if number in self._leaves or number in self._labels.accumulating:
            return None
        following = (edge for edge in self._labels.following[number] if edge is not None)
        if all(self._homes.get(edge.node) is None for edge in following):
            # Autograd makes a node, then its operation is recorded.
            recorded = self._first.get(self._labels.numbers[number] + 1, [])
            if number not in self._labels.custom:
                recorded = recorded[:1]
            if not any(node in self._stage_of for node in recorded):
                return None
        return self._labels.stage_of(number)


def _views_made_again(
    nodes: Sequence[fx.Node], entering: Collection[tuple[fx.Node, int]]
) -> dict[fx.Node, fx.Node]:
    """Replace a view of a gradient that was recorded twice by its first copy.

    Functionalization makes a view again when its base was written to; if another autograd node
    reads it next, the second copy carries that node's label although the gradient came along an
    edge.

    Returns:
        The first of each.
    """
    known: dict[object, fx.Node] = {}
    firsts: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if TURN not in node.meta or not node.all_input_nodes or not is_view(node):
            continue
        first = known.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        base = node.all_input_nodes[0]
        turn, other = node.meta[TURN], base.meta.get(TURN)
        same = first.meta[TURN].node == turn.node
        within_turn = other is None or (other.node == turn.node and not turn.adding)
        foreign = not within_turn and (base, turn.node) not in entering
        if first is not node and (same or foreign):
            node.replace_all_uses_with(first)
            firsts[node] = first
    return firsts


def _total(edge: Edge, handed: Sequence[Handed], taken: set[fx.Node]) -> fx.Node:
    """Find the sum of the gradients along an edge, added up in the order in which they came.

    Args:
        edge: where they meet.
        handed: the gradients.
        taken: the sums that belong to other edges, which may be of the same gradients.
    """
    total = handed[0].value
    for gradient in handed[1:]:
        sums = [
            user
            for user in _users(total)
            if user.target is aten.add.Tensor
            and user not in taken
            and TURN in user.meta
            and user.meta[TURN].adding
            and {_origin(used) for used in user.all_input_nodes} == {total, gradient.value}
        ]
        turns = ((n, user.meta.get(TURN)) for n in sums for user in n.users)
        read = (n for n, turn in turns if turn is not None and turn.node == edge.node)
        total = next(read, sums[0])
        taken.add(total)
    return total


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """The readers of a value, or of another form of it."""
    for user in node.users:
        yield user
        if TURN in user.meta and user.meta[TURN].adding and user.target is not aten.add.Tensor:
            yield from _users(user)


def _origin(node: fx.Node) -> fx.Node:
    """The value that was added up, of which torch may have made another form first."""
    while TURN in node.meta and node.meta[TURN].adding and node.target is not aten.add.Tensor:
        node = node.all_input_nodes[0]
    return node


def is_forward(node: fx.Node) -> bool:
    """Whether a node was recorded before the backward began."""
    return TURN not in node.meta
