"""How many bytes a piece of a stage needs while it runs, read off its graph.

A call never holds all that it reads beside all that it returns: it lets go on the way of what it
was handed for good, and its results come into being one by one. So the values of the graph are
followed from where they are written to where they are last read.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection

import torch
from torch import fx

from fpipe.graph.nodes import COPIES, is_product, is_random, is_view, nbytes_of


def footprint(graph: fx.Graph, handed: Collection[int], *, fuses: bool) -> int:
    """Most bytes that a call holds at one time beyond those that were held when it started.

    Args:
        graph: placeholders, ops, and one tuple of outputs, each with its fake value in
            ``meta["val"]``.
        handed: numbers of the inputs that the call alone holds: each goes after its last read.
        fuses: elementwise values are computed where they are read and take no memory, unless a
            matrix product (or what else comes from a library) or the caller reads them. Otherwise
            every op writes its result.

    What a library takes for itself, such as the packed operands of a matrix product, is not seen.

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
    rests_on = _memory(nodes, fuses)
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
            over = [n for n in gone if n.op != "placeholder" and nbytes_of(n) == size][:1]
            held -= sum(map(nbytes_of, over))
            gone = [n for n in gone if n not in over]
        peak = max(peak, held)
        unread = size - sum(nbytes_of(value) for value in _made_by(node) if value in last)
        held -= unread + sum(map(nbytes_of, gone))
    return peak


def _memory(nodes: Collection[fx.Node], fuses: bool) -> dict[fx.Node, frozenset[fx.Node]]:
    """For each node, the values that must be in memory for it to be read."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in nodes:
        if node.op == "call_function" and (is_view(node) or _is_of_elementwise(node, fuses)):
            found[node] = found[node.all_input_nodes[0]]
        elif fuses and _is_elementwise(node) and all(map(_reads_by_element, node.users)):
            found[node] = frozenset().union(*(found[n] for n in node.all_input_nodes))
        else:
            found[node] = _made_by(node)
    return found


def _made_by(node: fx.Node) -> frozenset[fx.Node]:
    """What an op writes: itself, or its elements if it returns several."""
    elements = [user for user in node.users if user.target is operator.getitem]
    return frozenset(elements or [node])


def _is_elementwise(node: fx.Node) -> bool:
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and (torch.Tag.pointwise in target.tags or target in COPIES)
        and not is_random(node)
    )


def _is_of_elementwise(node: fx.Node, fuses: bool) -> bool:
    """Whether it is one of several values that are computed where they are read."""
    return fuses and node.target is operator.getitem and _is_elementwise(node.all_input_nodes[0])


def _reads_by_element(node: fx.Node) -> bool:
    """Whether generated code can compute what `node` reads at the place where it reads it."""
    if node.op == "output" or is_product(node):
        return False
    looks = is_view(node) or node.target is operator.getitem
    return not looks or all(map(_reads_by_element, node.users))
