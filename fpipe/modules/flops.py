"""FLOPs of a recorded operation: torch's own formulas, and those that its counter lacks.

The counter knows attention by the kernels of devices. What is recorded on the CPU calls another
one, as it does for a recurrent layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
    shape_wrapper,
)

aten = torch.ops.aten

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
