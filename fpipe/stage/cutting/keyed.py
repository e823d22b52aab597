"""Let a recorded forward graph draw from keys what it would draw from torch's generator.

Each drawing op becomes the plain tensor operations of `fpipe.random`, on a key that comes in as an
argument of its own. So layers of one kind stay alike, and what they draw is computed where it is
read, again or not, as the remat policy likes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fpipe.draws import KEYED, draws, refusal
from fpipe.errors import StageError
from fpipe.stage.graphs.nodes import marks_of


def draw_from_keys(name: str, graph: fx.Graph, key: Tensor, mode: FakeTensorMode) -> list[fx.Node]:
    """Replace the ops that draw.

    Args:
        name: the function in messages.
        graph: changed in place.
        key: a fake one.
        mode: the fake-tensor mode of the graph's values.

    Returns:
        The placeholder of the key of each op that drew, in their order; they follow the others.

    Raises:
        StageError: an op draws that has no function of a key.
    """
    drawing = [node for node in graph.nodes if draws(node.target, node.args, node.kwargs)]
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    recorded: dict[Hashable, fx.GraphModule] = {}
    keys: list[fx.Node] = []
    for node in drawing:
        if node.target not in KEYED:
            raise StageError(f"{name} {refusal(node.target)}")
        with graph.inserting_after(keys[-1] if keys else last):
            keys.append(graph.placeholder(f"key_{len(keys)}"))
        keys[-1].meta |= {"val": key} | marks_of(node)
        kind = _kind(node)
        if kind not in recorded:
            recorded[kind] = _record(node, key, mode)
        _inline(recorded[kind].graph, node, keys[-1])
    return keys


def _kind(node: fx.Node) -> Hashable:
    """Equal for ops that are recorded alike."""

    def described(used: fx.Node) -> Any:
        value = used.meta["val"]
        return (tuple(value.shape), value.stride(), value.dtype, value.device)

    return node.target, repr(fx.map_arg((node.args, node.kwargs), described))


def _record(node: fx.Node, key: Tensor, mode: FakeTensorMode) -> fx.GraphModule:
    """The operations that draw from a key what `node` draws: of the key, and of the tensors."""
    values = [used.meta["val"] for used in node.all_input_nodes]

    def drawn(key: Tensor, *tensors: Tensor) -> Any:
        given = dict(zip(node.all_input_nodes, tensors, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: given[used])
        return KEYED[node.target](key, *args, **kwargs)  # type: ignore[index]

    with mode:
        return make_fx(drawn, tracing_mode="fake")(key, *values)


def _inline(operations: fx.Graph, node: fx.Node, key: fx.Node) -> None:
    """Put them in the place of `node`."""
    inputs = [own for own in operations.nodes if own.op == "placeholder"]
    copies = dict(zip(inputs, [key, *node.all_input_nodes], strict=True))
    with node.graph.inserting_before(node):
        for own in operations.nodes:
            if own.op == "output":
                continue
            assert own.op in ("placeholder", "call_function"), f"{own.op} in what draws from a key"
            if own not in copies:
                copies[own] = node.graph.node_copy(own, lambda used: copies[used])
                copies[own].meta |= marks_of(node)
    returned: Any = operations.output_node().args[0]
    if isinstance(returned, fx.Node):
        node.replace_all_uses_with(copies[returned])
    else:
        for element in list(node.users):
            element.replace_all_uses_with(copies[returned[element.args[1]]])
            node.graph.erase_node(element)
    node.graph.erase_node(node)
