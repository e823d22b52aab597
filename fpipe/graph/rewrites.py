"""Rewrites of recorded graphs: of ops that write to their arguments and do not say so, that rely on
the layout which their argument had while recorded, or that draw.

A new node takes the marks of the node that it replaces.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.errors import StageError
from fpipe.graph.nodes import is_view, marks_of
from fpipe.inputs.ambient import without_autocast
from fpipe.torch_internals import FakeTensorMode

aten = torch.ops.aten

# Their schemas keep silent about the running statistics, which they write to.
_BATCH_NORMS = frozenset({aten.native_batch_norm.default, aten.cudnn_batch_norm.default})

_BACKWARDS = frozenset(
    {aten.native_batch_norm_backward.default, aten.cudnn_batch_norm_backward.default}
)

# With a probability given beside the tensor whose shape they take.
_BERNOULLIS = frozenset({aten.bernoulli.p, aten.bernoulli.Tensor})

# What overwrites a value with what is drawn, as functionalisation writes it, or draws as many as
# there are of it: not differentiable.
OVERWRITES = frozenset(
    {
        *(getattr(aten.randint_like, name) for name in aten.randint_like.overloads()),
        aten.normal_functional.default,
        *(op.default for op in (aten.uniform, aten.exponential, aten.geometric)),
        *(op.default for op in (aten.log_normal, aten.cauchy)),
        *_BERNOULLIS,
    }
)


def free_views_of_layout(graph: fx.Graph) -> None:
    """Replace ``view`` by ``reshape``, which copies where a layout is not that of the trace.

    What crosses a boundary becomes contiguous: a value that was transposed before a boundary and is
    transposed back behind it, as a recurrent layer does with batches, can be viewed no more.
    """
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default


def with_uniform_draws(graph: fx.Graph) -> fx.Graph:
    """The graph with dropout drawn from uniform numbers, which Inductor draws itself.

    On the CPU it leaves ``bernoulli`` to a kernel that draws from the generator which seeds its own
    draws, too, and in an order that depends on what else a graph returns: with another remat policy
    it would draw other numbers. What is drawn without a dtype it draws in float32, whatever the
    default was in the trace.
    """
    copied = copy_of(graph)
    for node in list(copied.nodes):
        if node.target in (aten.rand.default, aten.randn.default):
            node.kwargs = {**node.kwargs, "dtype": node.meta["val"].dtype}
        if node.target not in _BERNOULLIS or node.kwargs.get("generator") is not None:
            continue
        like = node.meta["val"]
        with copied.inserting_before(node):
            place = {"dtype": torch.float32, "device": like.device}
            uniform = copied.call_function(aten.rand.default, (list(like.shape),), place)
            compare = aten.lt.Tensor if isinstance(node.args[1], fx.Node) else aten.lt.Scalar
            drawn = copied.call_function(compare, (uniform, node.args[1]))
            cast = copied.call_function(aten._to_copy.default, (drawn,), {"dtype": like.dtype})
        node.replace_all_uses_with(cast)
        copied.erase_node(node)
    return copied


def copy_of(graph: fx.Graph) -> fx.Graph:
    """The same graph, to be rewritten in place."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


def return_statistics(name: str, graph: fx.Graph) -> None:
    """Let batch normalisations return their running statistics instead of writing to them.

    Args:
        name: the function in messages.
        graph: changed in place; a backward, if it has one, does not need them.

    Raises:
        StageError: the statistics are a part of another tensor, which would change with them.
    """
    for node in list(graph.nodes):
        if node.target not in _BATCH_NORMS or not node.args[5]:
            continue
        running = [arg for arg in node.args[3:5] if isinstance(arg, fx.Node)]
        if not running:
            continue
        if any(is_view(arg) for arg in running):
            raise StageError(
                f"{name} lets a batch normalisation update running statistics that are a view of "
                "another tensor: clone() each of them before, or call fpipe.nn.batch_norm"
            )
        with graph.inserting_after(node):
            whole = graph.call_function(aten._native_batch_norm_legit_functional.default, node.args)
        outputs: tuple[Any, ...] = node.meta["val"]
        values = (*outputs[:3], *(arg.meta["val"] for arg in running))
        whole.meta |= {"val": values} | marks_of(node)
        later = set(_after(whole))
        for user in list(node.users):
            user.replace_input_with(node, whole)
        for index, arg in enumerate(running, 3):
            with graph.inserting_after(whole):
                new = graph.call_function(operator.getitem, (whole, index))
            new.meta |= {"val": arg.meta["val"]} | marks_of(node)
            readers = [user for user in arg.users if user in later]
            for user in (user for user in readers if user.target not in _BACKWARDS):
                user.replace_input_with(arg, new)
        graph.erase_node(node)


def _after(node: fx.Node) -> list[fx.Node]:
    """The nodes that come later."""
    later = []
    while node.next.op != "root":
        node = node.next
        later.append(node)
    return later


def propagate(
    graph: fx.Graph, mode: FakeTensorMode, place: Callable[[Any], Any] = lambda value: value
) -> None:
    """Run a graph of pure operations on the fake values of its placeholders and attributes.

    A view that the new strides do not allow becomes a view of a copy.

    Args:
        graph: changed in place.
        mode: the fake-tensor mode of its values.
        place: what takes the place of an argument of an operation, such as a device.
    """
    with mode, torch.no_grad(), without_autocast():
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), place)
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
            try:
                node.meta["val"] = node.target(*args, **kwargs)
            except RuntimeError:
                if node.target is not aten.view.default:
                    raise
                _view_of_copy(graph, node, args)


def _view_of_copy(graph: fx.Graph, node: fx.Node, args: tuple[Any, ...]) -> None:
    value: Tensor = args[0].contiguous()
    with graph.inserting_before(node):
        options: dict[str, Any] = {"memory_format": torch.contiguous_format}
        copy = graph.call_function(aten.clone.default, (node.args[0],), options)
    copy.meta |= {"val": value} | marks_of(node)
    node.update_arg(0, copy)
    node.meta["val"] = aten.view.default(value, *args[1:])
