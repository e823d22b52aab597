"""A function with cuts that calls `torch.autograd.Function`s with gradients of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fpipe

WIDTH, STAGES, MICROBATCHES = 5, 4, 4


class Wrong(torch.autograd.Function):
    """Every gradient is wrong on purpose, so that it is seen to be used."""

    @staticmethod
    def forward(
        x: Tensor, scale: Tensor, index: Tensor, power: int = 2, nothing: None = None
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        doubled = x * 1.0
        doubled.mul_(2)
        return doubled * scale, (x * scale).sum(), (x > 0).sum() + index.sum(), power

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, scale, _, ctx.power, _ = inputs
        ctx.save_for_backward(x, scale, output[0])
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, scale, y = ctx.saved_tensors
        first = grads[0].clone()
        first[0] = 0
        for_scale = (grads[0] * x * 7).sum(0) if ctx.needs_input_grad[1] else None
        return first * scale**ctx.power + grads[1] * y, for_scale, None, None, None


class WrongWithCtx(torch.autograd.Function):
    """The same, with a forward that takes ctx and keeps what is neither given nor returned."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, index: Tensor, power: int = 2, nothing: None = None
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        doubled = x * 1.0
        doubled.mul_(2)
        y = doubled * scale
        count = (x > 0).sum() + index.sum()
        ctx.power = power
        ctx.kept = {"tanh": torch.tanh(x), "pair": (scale, 3)}
        ctx.save_for_backward(x, None, y, x.exp())
        ctx.mark_non_differentiable(count)
        return y, (x * scale).sum(), count, power

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, nothing, y, exp = ctx.saved_tensors
        scale, three = ctx.kept["pair"]
        assert nothing is None
        first = grads[0].clone()
        first[0] = 0
        for_scale = (grads[0] * exp * three).sum(0) if ctx.needs_input_grad[1] else None
        given = first * scale**ctx.power + grads[1] * y * ctx.kept["tanh"] + x
        return given, for_scale, None, None, None


class Old(torch.autograd.Function):
    """As most are written: one tensor in and out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        given = grads[0].clone()
        given[x < 0] = 0.5
        return given


class Reversed(torch.autograd.Function):
    """Returns what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -ctx.strength * grads[0], None


def layer(function: Any, p: Any, x: Tensor, index: Tensor, power: int) -> Tensor:
    """Calls it on values, on parameters and on an argument as it came."""
    hidden = torch.tanh(x @ p["w"])
    y, total, count, three = function.apply(hidden, p["b"], index, power)
    # A parameter alone, and a value that is used on after it has been given.
    weight = Old.apply(p["v"])
    return Reversed.apply(Old.apply(y), 0.5) * weight + hidden * total / 9 + count * three / 99


def with_cuts(function: Any, params: Any, batch: Any, powers: Any = (2, 2, 2, 3)) -> Tensor:
    """The loss."""
    x = batch["x"]
    for number, (p, power) in enumerate(zip(params, powers, strict=True)):
        x = layer(function, p, x, batch["index"], power)
        if number < len(params) - 1:
            x = fpipe.cut(x)
    skip = function.apply(batch["x"], params[0]["b"], batch["index"])[0]
    return (x.square() + skip).mean()


def make_params() -> Any:
    """In float64, the same each time."""
    torch.manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64) / 2

    return [{"w": drawn(WIDTH, WIDTH), "b": drawn(WIDTH), "v": drawn(WIDTH)} for _ in range(STAGES)]


def make_batch() -> Any:
    """Numbers, and indices that have no gradient."""
    torch.manual_seed(1)
    return {
        "x": torch.randn(8, WIDTH, dtype=torch.float64),
        "index": torch.arange(8).reshape(8, 1),
    }
