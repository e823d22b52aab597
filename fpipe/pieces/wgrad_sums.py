"""Adds the product that is a weight's gradient to its float32 sum in one kernel, on CUDA.

Under weights of 16 bits whose gradients are summed in float32, a piece that sums ends in

    activations ─► t ─┐                                           Inductor's way
    cotangents ───────┴► mm, 16 bits ─► memory ─► float32 ─┐
    sum so far ────────────────────────────────────────────┴► add ─► sum

    activations ─► t ─┐                                           in one kernel
    cotangents ───────┼► sum_with_product ─► sum
    sum so far ───────┘

The second spares the memory of the product, the pass that adds it, and its rounding to 16 bits.
Whether it is faster depends on the device, on the shapes, and on how good cuBLAS is for them. So
before such a graph goes to Inductor, both are timed on numbers of the same shapes, strides and
dtypes, once in a process, and the kernel is taken where it is faster than what Inductor makes. It
needs Triton.

``compile={"options": {"fpipe.wgrad_kernel": False}}`` leaves all to Inductor.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx

from fpipe.graph.nodes import value_of
from fpipe.graph.rewrites import copy_of

log = logging.getLogger("fpipe")
aten = torch.ops.aten

OPTION: Final = "fpipe.wgrad_kernel"
"""The option of ``compile=`` that turns the kernel off."""

ROUNDS: Final = 20
"""Calls of each way that are timed, in turn."""

GAIN: Final = 0.98
"""The share of the time of Inductor's way that the kernel may take: less is noise."""


class Operand(NamedTuple):
    """A matrix, as far as the time of a kernel depends on it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Tensor) -> Operand:
        """Those of a tensor, which may be abstract."""
        return cls(tuple(value.shape), value.stride(), value.dtype)

    def drawn(self, device: torch.device, seed: int) -> Tensor:
        """Such a matrix of normal numbers; the generators of the caller stay as they are."""
        steps = zip(self.shape, self.stride, strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in steps)
        generator = torch.Generator(device).manual_seed(seed)
        memory = torch.randn(extent, generator=generator, dtype=self.dtype, device=device)
        return memory.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Problem:
    """A sum of a matrix and a product.

    Attributes:
        so_far, a, b: of ``so_far + a @ b``.
        device: where it is computed.
        options: with which Inductor compiles it.
    """

    so_far: Operand
    a: Operand
    b: Operand
    device: torch.device
    options: Mapping[str, Any] = field(hash=False)


Choose = Callable[[Problem], int | None]


def with_wgrad_kernel(graph: fx.Graph, choose: Choose, options: Mapping[str, Any]) -> fx.Graph:
    """The graph with sums of weight gradients done by the kernel, where it is chosen.

    Args:
        graph: of a piece.
        choose: the number of a configuration of the kernel, or None to leave the sum as it is.
        options: with which Inductor compiles the graph.
    """
    copied = copy_of(graph)
    for total in copied.find_nodes(op="call_function", target=aten.add.Tensor):
        chain = _product_in(total)
        if not chain:
            continue
        so_far, product, is_turned = total.all_input_nodes[0], chain[-1], len(chain) == 3
        a, b = product.all_input_nodes
        values = [value_of(a), value_of(b)]
        if is_turned:  # (a @ b).t() is b.t() @ a.t()
            a, b, values = b, a, [value_of(b).t(), value_of(a).t()]
        sum_, left, right = map(Operand.of, (value_of(so_far), *values))
        config = choose(Problem(sum_, left, right, value_of(total).device, options))
        if config is None:
            continue
        if is_turned:
            with copied.inserting_before(total):
                a, b = (copied.call_function(aten.t.default, (node,)) for node in (a, b))
            a.meta["val"], b.meta["val"] = values
        total.target = torch.ops.fpipe.sum_with_product.default
        total.args = (so_far, a, b, config)
        for node in chain:
            copied.erase_node(node)
    return copied


def _product_in(total: fx.Node) -> list[fx.Node]:
    """The nodes that lead to a product of 16 bits that a piece adds to a sum of its caller's, and
    returns.

    The sum so far comes in and serves nothing else, and the new one goes out.

    Returns:
        The cast, the turn if there is one, and the product; empty where it is no such sum.
    """
    so_far, term = total.args
    if total.kwargs or not isinstance(so_far, fx.Node) or not isinstance(term, fx.Node):
        return []
    chain = [term]
    if term.target is aten._to_copy.default:
        chain += term.all_input_nodes
        if chain[-1].target is aten.t.default:
            chain += chain[-1].all_input_nodes
    product = chain[-1]
    if so_far.op != "placeholder" or product.target is not aten.mm.default or len(chain) == 1:
        return []
    alone = all(len(node.users) == 1 for node in (so_far, total, *chain))
    if not alone or next(iter(total.users)).op != "output" or len(product.all_input_nodes) == 1:
        return []
    values = [value_of(node) for node in (product, *product.all_input_nodes)]
    is_sum = value_of(so_far).dtype is value_of(total).dtype is torch.float32
    short = all(value.dtype in (torch.bfloat16, torch.float16) for value in values)
    alike = value_of(so_far).shape == value_of(term).shape and values[0].numel() > 0
    return chain if is_sum and short and alike else []


# ── which way is faster ─────────────────────────────────────────────────────────────────────────


def choose_measured(problem: Problem) -> int | None:
    """The configuration that is faster than Inductor's way on this device, if one is."""
    if problem.device.type != "cuda" or not _has_triton():
        return None
    return _measured(problem)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _measured(problem: Problem) -> int | None:
    """Times both ways, on numbers that are drawn."""
    from fpipe.pieces.wgrad_kernel import CONFIGS, add_product

    operands = (problem.so_far, problem.a, problem.b)
    try:
        so_far, a, b = (each.drawn(problem.device, seed) for seed, each in enumerate(operands))
        plain = partial(_inductor([so_far, a, b], problem.options), so_far, a, b)
        expected = plain()
    except torch.OutOfMemoryError:
        return None
    ways: dict[int | None, Callable[[], Tensor]] = {None: plain}
    for number, config in enumerate(CONFIGS):
        way = partial(add_product, so_far, a, b, config)
        try:
            difference = float((way() - expected).abs().max() / expected.abs().max())
        except Exception as reason:  # a device may have too little shared memory
            log.info("the kernel for sums of weight gradients cannot run by %s: %s", config, reason)
            continue
        if difference < 2**-6:  # the product of the other way is rounded
            ways[number] = way
        else:
            log.warning("the kernel for sums of weight gradients errs by %.2g: left", difference)
    times = milliseconds(ways, problem.device)
    best = fastest(times)
    log.info(
        "a sum with a product of %s and %s takes %.3f ms by Inductor, %.3f by the kernel: %s",
        tuple(problem.a.shape),
        tuple(problem.b.shape),
        times[None],
        min((time for way, time in times.items() if way is not None), default=float("nan")),
        "the kernel" if best is not None else "Inductor",
    )
    return best


def fastest(times: Mapping[int | None, float]) -> int | None:
    """The number of the fastest way, if it is faster than None, which is Inductor's.

    Example:
        >>> fastest({None: 1.0, 0: 0.9, 1: 0.8}), fastest({None: 1.0, 0: 0.99})
        (1, None)
    """
    best = min(times, key=times.__getitem__)
    return best if times[best] < GAIN * times[None] else None


def milliseconds(
    ways: Mapping[int | None, Callable[[], Tensor]], device: torch.device
) -> dict[int | None, float]:
    """The median time of each way, timed in turn, for a device slows down as it grows warm."""
    pairs: dict[int | None, list[tuple[Any, Any]]] = {name: [] for name in ways}
    with torch.cuda.device(device):
        for _ in range(ROUNDS):
            for name, way in ways.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                way()
                end.record()
                pairs[name].append((start, end))
        torch.cuda.synchronize()
    return {name: median(a.elapsed_time(b) for a, b in taken) for name, taken in pairs.items()}


def _inductor(values: list[Any], options: Mapping[str, Any]) -> Callable[..., Tensor]:
    """The sum as Inductor makes it."""
    from torch._inductor import compile as compile_graph
    from torch.fx.experimental.proxy_tensor import make_fx

    def plain(so_far: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        return [so_far + torch.mm(a, b).to(so_far.dtype)]

    compiled: Any = compile_graph(make_fx(plain)(*values), values, options=dict(options))
    return lambda *arguments: compiled(*arguments)[0]


# ── the operation ───────────────────────────────────────────────────────────────────────────────

_LIBRARY = torch.library.Library("fpipe", "FRAGMENT")
_LIBRARY.define(
    "sum_with_product(Tensor so_far, Tensor a, Tensor b, int config) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)


@torch.library.impl(_LIBRARY, "sum_with_product", "CompositeExplicitAutograd")
def _sum_with_product(so_far: Tensor, a: Tensor, b: Tensor, config: int) -> Tensor:
    from fpipe.pieces.wgrad_kernel import CONFIGS, add_product

    return add_product(so_far, a, b, CONFIGS[config])


@torch.library.impl(_LIBRARY, "sum_with_product", "Meta")
def _shape_of_sum(so_far: Tensor, a: Tensor, b: Tensor, config: int) -> Tensor:
    return torch.empty_like(so_far)
