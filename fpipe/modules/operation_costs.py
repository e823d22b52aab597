"""What the backward of a recorded part needs, judged operation by operation.

Nothing is differentiated, so this is a guess on the safe side: of an operation that is not known
here, inputs and outputs are needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
    shape_wrapper,
)

from fpipe.divide.dividing import Part
from fpipe.graph.joint import Param
from fpipe.graph.nodes import base_of, is_product, is_view, nbytes_of

aten = torch.ops.aten

# Their gradients need neither what goes in nor what comes out.
_LINEAR = frozenset(
    {
        aten.add,
        aten.cat,
        aten.clone,
        aten.constant_pad_nd,
        aten.copy,
        aten.mean,
        aten.neg,
        aten.stack,
        aten.sub,
        aten.sum,
        aten._to_copy,
    }
)
# Their gradients are made of what comes out.
_BY_OUTPUT = frozenset(
    {
        aten._log_softmax,
        aten._safe_softmax,
        aten._softmax,
        aten.exp,
        aten.reciprocal,
        aten.relu,
        aten.rsqrt,
        aten.sigmoid,
        aten.sqrt,
        aten.tanh,
    }
)
# Their gradients are made of what goes in, as those of products are.
_BY_INPUT = frozenset({aten.gelu, aten.mul, aten.pow, aten.silu})


class Saved(NamedTuple):
    """What the gradients of one part need.

    Attributes:
        values: that it makes or reads, parameters and what is made of these alone left out.
        left: bytes of what the gradients of parameters need, once those of inputs are there, of the
            values that it makes; and the gradients of what the operations on parameters return.
        prepared: bytes that it makes of parameters alone.
    """

    values: frozenset[fx.Node]
    left: int
    prepared: int


def saved_of(part: Part) -> Saved:
    """What the gradients of a part of a recorded module need."""
    placeholders = part.graph.find_nodes(op="placeholder")
    params = {node for node in placeholders if isinstance(part.sources[node.name], Param)}
    prepared = gradients = 0
    values: set[fx.Node] = set()
    read: set[fx.Node] = set()
    for node in part.graph.nodes:
        if node.op != "call_function":
            continue
        inputs = [used for used in node.all_input_nodes if used not in params]
        if node.all_input_nodes and not inputs:
            params.add(node)
            prepared += made_by(node)
        elif is_work(node):
            values |= _needed(node, {origin_of(used) for used in inputs})
            if len(inputs) < len(node.all_input_nodes):
                read |= {origin_of(used) for used in inputs}
                gradients += made_by(node)
    return Saved(frozenset(values), gradients + sum(map(made_by, read)), prepared)


def _needed(node: fx.Node, inputs: set[fx.Node]) -> set[fx.Node]:
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _LINEAR:
        return set()
    if packet in _BY_OUTPUT:
        return {node}
    # Attention is a product too; it returns several values, and needs them.
    is_one = not isinstance(node.meta["val"], tuple | list)
    if packet in _BY_INPUT or (is_product(node) and is_one):
        return inputs
    return inputs | {node}


def is_work(node: fx.Node) -> bool:
    """Whether a node computes, and does not only look at what is there."""
    return isinstance(node.target, torch._ops.OpOverload) and not is_view(node)


def made_by(node: fx.Node) -> int:
    """Bytes that a node makes."""
    return nbytes_of(node) if is_work(node) else 0


def origin_of(node: fx.Node) -> fx.Node:
    """The operation that made what a node looks at, of whose values it may be one."""
    node = base_of(node)
    while node.target is operator.getitem:
        node = base_of(node.all_input_nodes[0])
    return node


# FLOPs of a recorded operation: torch's own formulas, and those that its counter lacks. The counter
# knows attention by the kernels of devices; what is recorded on the CPU calls another one.

_Shape = Sequence[int]

# Others' operations, and of torch's those that are neither products nor passes over their elements.
_OPAQUE = (
    "aten._cdist_forward",
    "aten._cudnn_rnn",
    "aten._fft_",
    "aten._linalg_",
    "aten._thnn_fused_",
    "aten._trilinear",
    "aten.linalg_",
    "aten.miopen_",
)
_KNOWN = ("aten.", "prims.", "fpipe.")


def flops_of(node: fx.Node) -> int:
    """FLOPs of what a node computes; 0 if there is no formula."""
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(packet) or _WRAPPED.get(packet)
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def is_uncounted(node: fx.Node) -> bool:
    """Whether a node may be heavy and has no formula."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is None or packet in flop_registry or packet in _FORMULAS:
        return False
    name = str(packet)
    return name.startswith(_OPAQUE) or not name.startswith(_KNOWN)


def _attention(query: _Shape, key: _Shape, value: _Shape, *_: Any, **options: Any) -> int:
    return int(sdpa_flop_count(query, *_as_many_heads(query, key, value)))


def _attention_backward(
    grad: _Shape, query: _Shape, key: _Shape, value: _Shape, *_: Any, **options: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, query, *_as_many_heads(query, key, value)))


def _as_many_heads(query: _Shape, *others: _Shape) -> list[_Shape]:
    """Keys and values of grouped queries, as each query sees them; older torch has no such case."""
    return [(batch, query[1], *rest) for batch, _, *rest in others]


def _product(left: _Shape, right: _Shape, *_: Any, **options: Any) -> int:
    """A product whose rows, columns or terms may be divided into groups."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return int(2 * groups * left[-2] * left[-1] * right[-1])


def _recurrent(given: _Shape, inner: _Shape, hidden: _Shape, *_: Any, **options: Any) -> int:
    """A layer in one direction: at each place of each sequence, both matrices."""
    return 2 * prod(given[:-1]) * (prod(inner) + prod(hidden))


_FORMULAS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._grouped_mm: _product,
    aten._scaled_grouped_mm: _product,
    aten._int_mm: _product,
    aten.mkldnn_rnn_layer: _recurrent,
}
_WRAPPED: dict[Any, Callable[..., int]] = {
    packet: shape_wrapper(formula) for packet, formula in _FORMULAS.items()
}
