"""Operations of a graph replaced by the operations of a function that computes the same.

Nodes that call alike get copies of what was recorded once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fpipe.graph.node_writer import write_graph
from fpipe.graph.nodes import copy_into, marks_of, values_of
from fpipe.graph.rewrites import copy_of
from fpipe.inputs.signature import LeafShape
from fpipe.random import threefry

_WHOLE = torch.ops.fpipe.threefry2x32.default


class Inliner:
    """Puts functions in the place of nodes.

    Args:
        mode: the fake-tensor mode of the graph's values.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._recorded: dict[Hashable, fx.Graph] = {}

    def __call__(self, node: fx.Node, function: Callable[..., Any], *before: fx.Node) -> None:
        """Replace a node.

        Args:
            node: a call, of one result or of a tuple of them.
            function: of tensors for `before`, and of the arguments of `node`; the same for every
                node of the same target.
            before: further nodes that it reads.
        """
        kind = _kind(node, before)
        if kind not in self._recorded:
            self._recorded[kind] = self._record(node, function, before)
        _inline(self._recorded[kind], node, before)

    def call(self, before: fx.Node, function: Callable[[Tensor], Tensor], node: fx.Node) -> fx.Node:
        """A node in front of another that has what a function returns of a value."""
        with self._mode:
            operations = write_graph(function, [node.meta["val"]]).graph
        copy: fx.Node = _copied(operations, [node], before)
        return copy

    def _record(
        self, node: fx.Node, function: Callable[..., Any], before: tuple[fx.Node, ...]
    ) -> fx.Graph:
        read = node.all_input_nodes

        def on_tensors(*tensors: Tensor) -> Any:
            tensor_of = dict(zip(read, tensors[len(before) :], strict=True))
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: tensor_of[used])
            return function(*tensors[: len(before)], *args, **kwargs)

        values = [used.meta["val"] for used in (*before, *read)]
        with self._mode:
            return write_graph(on_tensors, values).graph


def with_draws_written_out(graph: fx.Graph) -> fx.Graph:
    """The graph with the plain operations of Threefry where a trace has recorded it as one."""
    if not graph.find_nodes(op="call_function", target=_WHOLE):
        return graph
    copied = copy_of(graph)
    whole = copied.find_nodes(op="call_function", target=_WHOLE)
    inline = Inliner(values_of(whole[0])[0].fake_mode)  # type: ignore[attr-defined]
    for node in whole:
        inline(node, threefry.written_out)
    return copied


def _kind(node: fx.Node, before: tuple[fx.Node, ...]) -> Hashable:
    """Equal for nodes that are recorded alike."""

    def described(used: fx.Node) -> Any:
        return tuple(LeafShape.of(used.meta["val"]))

    return node.target, repr(fx.map_arg((before, node.args, node.kwargs), described))


def _inline(operations: fx.Graph, node: fx.Node, before: tuple[fx.Node, ...]) -> None:
    """Put them in the place of `node`."""
    returned = _copied(operations, [*before, *node.all_input_nodes], node)
    if isinstance(returned, fx.Node):
        node.replace_all_uses_with(returned)
    else:
        for element in list(node.users):
            element.replace_all_uses_with(returned[element.args[1]])
            node.graph.erase_node(element)
    node.graph.erase_node(node)


def _copied(operations: fx.Graph, inputs: Sequence[fx.Node], before: fx.Node) -> Any:
    """Copy operations in front of a node; what they return of these inputs."""
    placeholders = operations.find_nodes(op="placeholder")
    copies = dict(zip(placeholders, inputs, strict=True))
    with before.graph.inserting_before(before):
        for operation in operations.nodes:
            if operation.op == "output" or operation in copies:
                continue
            assert operation.op == "call_function", (
                f"{operation.op} in what is put in front of {before.target}"
            )
            copies[operation] = copy_into(before.graph, operation, copies.__getitem__)
            copies[operation].meta |= marks_of(before)
    return fx.map_arg(operations.output_node().args[0], copies.__getitem__)
