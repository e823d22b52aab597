"""Matrix products in float32 on processors for which torch's BLAS has no fast code.

MKL is torch's BLAS on x86. On processors that are not Intel's it makes no use of AVX-512: one core
of a Zen 5 does 98 gigaflops a second by MKL, whatever instructions it is allowed, 110 by oneDNN
with AVX2 and 210 by oneDNN with AVX-512. A Zen 4, for which AVX-512 is two halves, does 80 to 98 by
MKL and 92 to 100 by oneDNN. torch carries oneDNN as well, but hands it no float32 product of a
training step, and Inductor those of frozen weights only. So before a graph goes to Inductor its
products become ops of fpipe's own, which call oneDNN.

With ``torch.backends.mkldnn.enabled = False`` before the first call of a pipeline all stay with
BLAS.
"""

from __future__ import annotations

import functools
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, fx

from fpipe.graph.rewrites import copy_of

aten = torch.ops.aten

SMALLEST: Final = 2**21
"""Multiplications below which a product stays with BLAS. A call of oneDNN costs 10 microseconds
more: on that processor 256 x 64 x 64 is as fast by either, 32 x 256 x 256 faster by oneDNN."""

_PROCESSORS = Path("/proc/cpuinfo")


def blas_is_slow() -> bool:
    """Whether oneDNN makes use of this processor where torch's BLAS does not."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and "AVX512" in torch.backends.cpu.get_cpu_capability()
        and not _is_intel()
    )


@functools.cache
def _is_intel() -> bool:
    """A processor that does not tell counts as Intel's, and nothing is changed."""
    try:
        information = _PROCESSORS.read_text()
    except OSError:
        return True
    return "vendor_id" not in information or "GenuineIntel" in information


def with_onednn(graph: fx.Graph) -> fx.Graph:
    """The graph with its bigger products of float32 matrices on the CPU done by oneDNN.

    A sum of which one term is such a product becomes one op with it, as in BLAS.
    """
    copied = copy_of(graph)
    for node in copied.find_nodes(op="call_function", target=aten.addmm.default):
        c, a, b = node.args
        if not node.kwargs and _pays(a, b) and _can_add(c, node):
            node.target = torch.ops.fpipe.add_product.default
    for node in copied.find_nodes(op="call_function", target=aten.mm.default):
        a, b = node.args
        if not _pays(a, b):
            continue
        node.target = torch.ops.fpipe.product.default
        term = _other_term(node)
        if term is not None and _can_add(term, node):
            (total,) = node.users
            total.target = torch.ops.fpipe.add_product.default
            total.args = (term, a, b)
            copied.erase_node(node)
    for node in copied.find_nodes(op="call_function", target=aten.bmm.default):
        if _pays(*node.args):
            node.target = torch.ops.fpipe.products.default
    return copied


def _other_term(product: fx.Node) -> Any:
    """The term added to a product that nobody else reads."""
    if len(product.users) != 1:
        return None
    (total,) = product.users
    if total.target is not aten.add.Tensor or total.kwargs:
        return None
    return next((term for term in total.args if term is not product), None)


def _pays(a: fx.Node, b: fx.Node) -> bool:
    left, right = a.meta["val"], b.meta["val"]
    multiplications = prod(left.shape[-2:]) * right.shape[-1]  # of one matrix of a batch
    several_rows = left.shape[-2] > 1  # a single one is limited by memory
    fit = all(v.dtype is torch.float32 and v.device.type == "cpu" for v in (left, right))
    return fit and several_rows and multiplications >= SMALLEST


def _can_add(term: Any, product: fx.Node) -> bool:
    """Whether `term` has a float32 for each column of the product, or for each element."""
    if not isinstance(term, fx.Node):
        return False
    value, like = term.meta["val"], product.meta["val"]
    return value.dtype is torch.float32 and value.shape in (like.shape, like.shape[1:])


# ── the ops ─────────────────────────────────────────────────────────────────────────────────────

_LIBRARY = torch.library.Library("fpipe", "DEF")
# Arguments in any layout, each in one of its own; the result is contiguous.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_LIBRARY.define("product(Tensor a, Tensor b) -> Tensor", tags=_TAGS)
_LIBRARY.define("products(Tensor a, Tensor b) -> Tensor", tags=_TAGS)
_LIBRARY.define("add_product(Tensor c, Tensor a, Tensor b) -> Tensor", tags=_TAGS)


@torch.library.impl(_LIBRARY, "product", "CPU")
def _product(a: Tensor, b: Tensor) -> Tensor:
    linear = torch.ops.mkldnn._linear_pointwise
    made: Tensor = linear.default(a, _apart(b).t(), None, "none", [], "")
    return made


@torch.library.impl(_LIBRARY, "products", "CPU")
def _products(a: Tensor, b: Tensor) -> Tensor:
    # oneDNN's own products of batches are for other dtypes.
    made = _shape_of_products(a, b)
    for row, left, right in zip(made, a, b, strict=True):
        row.copy_(_product(left, right))
    return made


@torch.library.impl(_LIBRARY, "add_product", "CPU")
def _add_product(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    linear, b = torch.ops.mkldnn._linear_pointwise, _apart(b)
    made: Tensor = (
        linear.default(a, b.t(), c.contiguous(), "none", [], "")
        if c.ndim == 1
        else linear.binary(a, c, b.t(), None, "add")
    )
    return made


def _apart(b: Tensor) -> Tensor:
    """A matrix whose rows, or columns, share no memory: oneDNN refuses others on the right."""
    (near, count), (far, _) = sorted(zip(b.stride(), b.shape, strict=True))
    return b if near == 0 or near * (count - 1) < far else b.contiguous()


@torch.library.impl(_LIBRARY, "product", "Meta")
def _shape_of_product(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


@torch.library.impl(_LIBRARY, "products", "Meta")
def _shape_of_products(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


@torch.library.impl(_LIBRARY, "add_product", "Meta")
def _shape_of_add_product(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return _shape_of_product(a, b)
