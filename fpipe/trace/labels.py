"""Where each node of a graph belongs that is recorded with its backward.

A forward node belongs to the stage in which it was recorded: its number is how many cuts had run. A
backward node belongs to the autograd node that was running, and that node to the stage that made
it, which its sequence number tells. Autograd nodes pass gradients along edges. Where several
gradients meet on one edge, autograd adds them; the sum belongs to the edge, not to a node.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fpipe.checks.explain import Untraceable
from fpipe.graph.nodes import COUNT, STAGE, TURN
from fpipe.torch_internals import (
    autograd_counter,
    current_autograd_node,
    get_proxy_mode,
    node_of,
    nodes_after,
)
from fpipe.trace.overrides.standin import Seeing


class Edge(NamedTuple):
    """An input of one of autograd's nodes, along which gradients come.

    Attributes:
        node: the number of autograd's node.
        place: of its inputs.
    """

    node: int
    place: int


class Handed(NamedTuple):
    """A gradient that one of autograd's nodes has handed on.

    Attributes:
        node: the number of the node that has it computed; -1 for what comes from outside.
        value: the node of the graph that is the gradient.
    """

    node: int
    value: fx.Node


class Turn(NamedTuple):
    """The autograd node that was running when a backward node was recorded.

    Attributes:
        node: the number of autograd's node.
        adding: the node had finished, and autograd was adding its gradients to others.
    """

    node: int
    adding: bool = False


class Labels(Seeing):
    """Labels the nodes of the graph that is being recorded.

    Attributes:
        cuts: autograd's counter at each cut that was executed.
        numbers: the sequence number of each of autograd's nodes that took part in the backward.
        following: for each of them, the edges that it hands gradients to.
        leaves: for each value that gradients are taken by, in order, its edge.
        handed: the gradients that came along each edge, in the order in which they came.
        root: the edge that the cotangent of the first root comes in by.
        accumulating: the numbers of those that would fill a leaf's ``.grad``.
        custom: the numbers of those that belong to Functions with a backward of their own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cuts: list[int] = []
        self.numbers: list[int] = []
        self.custom: set[int] = set()
        self.following: list[list[Edge | None]] = []
        self.leaves: list[Edge] = []
        self.root: Edge | None = None
        self.accumulating: set[int] = set()
        self.handed: dict[Edge, list[Handed]] = defaultdict(list)
        self._index: dict[Any, int] = {}  # autograd's node -> its number
        self._placed: dict[Edge, tuple[int, Any]] = {}  # the first gradient, if it is a DTensor
        self._backward = False
        self._running = self._done = -1
        self._last: fx.Node | None = None
        self._label: Mapping[str, Any] = {}
        self._graph: fx.Graph | None = None

    def cut(self) -> None:
        """A cut is executed."""
        self._settle()
        self.cuts.append(autograd_counter())

    def stage_of(self, node: int) -> int:
        """The stage in which one of autograd's nodes was made."""
        return bisect_right(self.cuts, self.numbers[node])

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, and label what it records."""
        self._settle()
        self._label = self._current()
        result = func(*args, **(kwargs or {}))
        self._settle()
        return result

    def __exit__(self, *error: Any) -> None:
        self._settle()
        super().__exit__(*error)

    def begin_backward(self, roots: Sequence[Tensor], chosen: Sequence[Tensor]) -> None:
        """A backward begins; hears each of autograd's nodes that will take part.

        Args:
            roots: what is differentiated.
            chosen: what it is differentiated by.
        """
        self._backward = True
        ends = {value.grad_fn for value in chosen}
        self.leaves = [Edge(self._number(value.grad_fn), value.output_nr) for value in chosen]
        self.root = Edge(self._number(roots[0].grad_fn), roots[0].output_nr)
        waiting = [value.grad_fn for value in roots]
        seen: set[Any] = set()
        while waiting:
            node: Any = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            number = self._number(node)
            if node in ends:
                self.following[number] = []
                continue
            self.following[number] = [
                None if successor is None else Edge(self._number(successor), place)
                for successor, place in node.next_functions
            ]
            waiting += [successor for successor, _ in node.next_functions]
            self._hear(node, number)

    def _hear(self, node: Any, number: int) -> None:
        """Hear when it is a node's turn, and what it hands on."""

        def begin(_: Any) -> None:
            self._settle()
            self._running = number

        def end(gradients: tuple[Tensor | None, ...], _: Any) -> Any:
            fitted = (
                tuple(map(_fitted, gradients, node.next_functions))
                if number in custom
                else gradients
            )
            fitted = tuple(map(_recorded, fitted))
            nodes = [None if value is None else node_of(value) for value in fitted]
            self._settle()
            self._done = number
            for edge, value, gradient in zip(self.following[number], nodes, fitted, strict=False):
                if edge is not None and value is not None:
                    self._check_placements(edge, number, gradient)
                    self.handed[edge].append(Handed(number, value))
            same = all(map(operator.is_, fitted, gradients))
            return None if same else fitted

        custom = self.custom
        node.register_prehook(begin)
        node.register_hook(end)

    def _check_placements(self, edge: Edge, number: int, gradient: Any) -> None:
        """Refuse gradients from several stages that cannot be added as they lie.

        Each stage sends its part of a sum as a local tensor.
        """
        placements = getattr(gradient, "placements", None)
        giver, first = self._placed.setdefault(edge, (number, placements))
        if placements != first and self.stage_of(giver) != self.stage_of(number):
            raise Untraceable(
                f"reads a DTensor in several stages, from which gradients come as {first} and as "
                f"{placements}",
                "redistribute it where it is made, or pass it on as a plain tensor, .to_local()",
            )

    def _number(self, node: Any) -> int:
        if node not in self._index:
            self._index[node] = len(self.numbers)
            self.numbers.append(node._sequence_nr())
            if hasattr(node, "variable"):
                self.accumulating.add(self._index[node])
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                self.custom.add(self._index[node])
            self.following.append([])
        return self._index[node]

    def _current(self) -> dict[str, Any]:
        if not self._backward:
            return {STAGE: len(self.cuts), COUNT: autograd_counter()}
        node = self._index.get(current_autograd_node(), -1)
        if node in (-1, self._running) and self._running != self._done:
            return {TURN: Turn(self._running)}  # what a node's own backward runs is its own too
        return {TURN: Turn(node, adding=node == self._done)}

    def _settle(self) -> None:
        """Label what has been recorded since."""
        if self._graph is None:
            mode = get_proxy_mode()
            if mode is None:
                return
            self._graph = mode.tracer.graph
        for node in nodes_after(self._graph, self._last):
            node.meta |= self._label
            self._last = node


def _recorded(value: Tensor | None) -> Tensor | None:
    """A gradient as a value of the graph: a backward may return a tensor that it closes over."""
    return value if value is None or node_of(value) is not None else value.clone()


def _fitted(gradient: Tensor | None, to: tuple[Any, int]) -> Tensor | None:
    """A gradient in the shape and dtype of what it is by, as autograd fits those of Functions."""
    node, place = to
    if gradient is None or node is None:
        return gradient
    like = node._input_metadata[place]
    if gradient.shape != like.shape:
        gradient = gradient.sum_to_size(like.shape)
    return gradient if gradient.dtype == like.dtype else gradient.to(like.dtype)
