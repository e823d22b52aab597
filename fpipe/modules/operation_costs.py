"""Costs of recorded operations: FLOPs, bytes, and the values that their backward needs.

FLOPs are those of torch's own formulas, and of formulas here that its counter lacks: the counter
knows attention by the kernels of devices, and a recording on the CPU calls another one.

The values that a backward needs are estimated: nothing is differentiated. The estimate errs on the
safe side, since an operation that is unknown here counts with its inputs and its outputs.
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

from fpipe.divide.dividing import Segment
from fpipe.graph.joint import Param
from fpipe.graph.nodes import base_of, is_product, is_view, nbytes_of

aten = torch.ops.aten


# ── FLOPs and bytes ─────────────────────────────────────────────────────────────────────────────

_Shape = Sequence[int]

# Operations that are neither products nor passes over their elements; and all that are not torch's.
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
    """FLOPs of an operation; 0 if there is no formula for it."""
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(packet) or _WRAPPED.get(packet)
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def is_uncounted(node: fx.Node) -> bool:
    """Whether an operation may be heavy and has no formula."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is None or packet in flop_registry or packet in _FORMULAS:
        return False
    name = str(packet)
    return name.startswith(_OPAQUE) or not name.startswith(_KNOWN)


def is_work(node: fx.Node) -> bool:
    """Whether a node computes new values, and is no view of others."""
    return isinstance(node.target, torch._ops.OpOverload) and not is_view(node)


def written_by(node: fx.Node) -> int:
    """Bytes that a node writes."""
    return nbytes_of(node) if is_work(node) else 0


def moved_by(node: fx.Node) -> int:
    """Bytes that a node reads and writes."""
    return nbytes_of(node) + sum(map(nbytes_of, node.all_input_nodes)) if is_work(node) else 0


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


def _recurrent(x: _Shape, inner: _Shape, hidden: _Shape, *_: Any, **options: Any) -> int:
    """A layer in one direction: at each place of each sequence, both matrices."""
    return 2 * prod(x[:-1]) * (prod(inner) + prod(hidden))


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


# ── values that the backward needs ──────────────────────────────────────────────────────────────

# Their gradients need neither inputs nor outputs.
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
# Their gradients are computed from their outputs.
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
# Their gradients are computed from their inputs, as those of products are.
_BY_INPUT = frozenset({aten.gelu, aten.mul, aten.pow, aten.silu})


class Saved(NamedTuple):
    """The values that the gradients of one part need.

    Attributes:
        values: among those that the part computes or reads; parameters, and values computed from
            parameters alone, are left out.
        left: bytes of values of the part that the gradients of parameters need once the gradients
            of its inputs are there, and of the gradients of what operations on parameters return.
        prepared: bytes of values computed from parameters alone.
    """

    values: frozenset[fx.Node]
    left: int
    prepared: int


def saved_by(segment: Segment) -> Saved:
    """Estimate what the gradients of a part of a recorded module need."""
    placeholders = segment.graph.find_nodes(op="placeholder")
    params = {node for node in placeholders if isinstance(segment.sources[node.name], Param)}
    prepared = gradients = 0
    values: set[fx.Node] = set()
    read: set[fx.Node] = set()
    for node in segment.graph.nodes:
        if node.op != "call_function":
            continue
        inputs = [used for used in node.all_input_nodes if used not in params]
        if node.all_input_nodes and not inputs:
            params.add(node)
            prepared += written_by(node)
        elif is_work(node):
            values |= _needed(node, {origin_of(used) for used in inputs})
            if len(inputs) < len(node.all_input_nodes):
                read |= {origin_of(used) for used in inputs}
                gradients += written_by(node)
    return Saved(frozenset(values), gradients + sum(map(written_by, read)), prepared)


def _needed(node: fx.Node, inputs: set[fx.Node]) -> set[fx.Node]:
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _LINEAR:
        return set()
    if packet in _BY_OUTPUT:
        return {node}
    # Attention is a product too; it returns several values, and its backward needs them.
    is_one = not isinstance(node.meta["val"], tuple | list)
    if packet in _BY_INPUT or (is_product(node) and is_one):
        return inputs
    return inputs | {node}


def origin_of(node: fx.Node) -> fx.Node:
    """The operation that computed the memory that a node views, or the tuple that it is part of."""
    node = base_of(node)
    while node.target is operator.getitem:
        node = base_of(node.all_input_nodes[0])
    return node
