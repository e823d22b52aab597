"""Stages that sleep: F, I and W each take their time, and none of it from the processor.

    x ─ shift, scale ─ nap ─ × ─► y   nap: sleeps forward, and on the gradient's way to the input
                 weight ─ late ┘      late: sleeps on the gradient's way to the weight alone

Both libraries run the same functions. To a tracer a nap is one opaque op, and to autograd a node.
"""

from __future__ import annotations

import time
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

WIDTH: Final = 8

Params = dict[str, Tensor]

_LIBRARY: Final = torch.library.Library("fpipe_naps", "DEF")
_LIBRARY.define("nap(Tensor x, float seconds) -> Tensor")
_LIBRARY.define("late_nap(Tensor x, float seconds) -> Tensor")


def _sleep(x: Tensor, seconds: float) -> Tensor:
    # The copy is a part of the nap: all of it takes `seconds`.
    end = time.perf_counter() + seconds
    copy = x.clone()
    time.sleep(max(0.0, end - time.perf_counter()))
    return copy


for _name in ("nap", "late_nap"):
    _LIBRARY.impl(_name, _sleep, "CPU")
    torch.library.register_fake(f"fpipe_naps::{_name}", lambda x, seconds: x.clone())


@register_flop_formula(torch.ops.fpipe_naps.late_nap)
def _late_nap_flops(*shapes: Any, **options: Any) -> int:
    # It stands for a matrix product, the kind of work that fpipe puts off to W: anything cheaper
    # is done at once, in I.
    return 1


class _Nap(torch.autograd.Function):
    """Sleeps in the forward and in the backward."""

    @staticmethod
    def forward(x: Tensor, seconds: float) -> Any:
        return torch.ops.fpipe_naps.nap(x, seconds)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.seconds = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.ops.fpipe_naps.nap(grads[0], ctx.seconds), None


class _Late(torch.autograd.Function):
    """Sleeps in the backward only."""

    @staticmethod
    def forward(x: Tensor, seconds: float) -> Any:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.seconds = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.ops.fpipe_naps.late_nap(grads[0], ctx.seconds), None


def stage(params: Params, x: Tensor, seconds: float) -> Tensor:
    """A stage whose F, I and W sleep `seconds` each. In and out: (rows, `WIDTH`).

    Two parameters stand before the nap, so that the first stage, whose input needs no gradient, has
    a chain of gradients to compute like any other.
    """
    x = (x + params["shift"]) * params["scale"]
    return _Nap.apply(x, seconds) * _Late.apply(params["weight"], seconds)


def init(seed: int) -> Params:
    """Fresh parameters of a stage."""
    generator = torch.Generator().manual_seed(seed)
    names = ("shift", "scale", "weight")
    return {name: torch.rand(WIDTH, generator=generator) + 0.5 for name in names}
