"""Backwards that return what depends on no gradient: auxiliary losses, penalties, signs.

What such a Function adds, it adds once for each microbatch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from tests.laid_out import laid_out
from tests.models import rand

MICROBATCHES = 4


class Auxiliary(torch.autograd.Function):
    """`x` as it came; the backward gives `loss` a gradient of one, as mixtures of experts do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, torch.ones((), dtype=g.dtype)


class Penalised(torch.autograd.Function):
    """`x` as it came; the backward adds the gradient of its L1 norm."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g + 0.1 * x.sign()


class Signs(Penalised):
    """Its backward does not look at the gradient."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.sign()


class Kept(torch.autograd.Function):
    """Its backward returns what the forward made, and what it was given."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Any:
        return x * w, x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1], output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> Any:
        w, y = ctx.saved_tensors
        return y, w.clone()


class Zeros(Signs):
    """Its backward stops all gradients."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.zeros_like(g)


def auxiliary(p: Any, x: Tensor) -> Tensor:
    y = x @ p["w"]
    return Auxiliary.apply(y.tanh(), (y * p["v"]).square().mean())


def penalised(p: Any, x: Tensor) -> Tensor:
    return Penalised.apply(x @ p["w"]) * p["v"]


def signs(p: Any, x: Tensor) -> Tensor:
    return Signs.apply((x * p["v"]) @ p["w"])


def kept(p: Any, x: Tensor) -> Tensor:
    y, e = Kept.apply(x @ p["w"], p["v"])
    return y + e


def zeros(p: Any, x: Tensor) -> Tensor:
    return Zeros.apply(x @ p["w"]) * p["v"]


LAYERS = {f.__name__: f for f in (auxiliary, penalised, signs, kept, zeros)}
PARAMS = [{"w": (n + 1) / 3 * rand(3, 3), "v": rand(3) + n} for n in range(4)]
BATCH = rand(8, 3)


def loss(y: Tensor, microbatch: Tensor) -> Tensor:
    return (y - microbatch).square().mean()


def expected_gradients(layer: Any, microbatches: int = MICROBATCHES) -> Any:
    own = [{k: v.clone().requires_grad_() for k, v in p.items()} for p in PARAMS]
    losses = []
    for x in BATCH.chunk(microbatches):
        y = x
        for p in own:
            y = layer(p, y)
        losses.append(loss(y, x))
    total = torch.stack(losses).mean()
    total.backward()
    zero = torch.zeros
    return total.detach(), [
        {k: zero(v.shape, dtype=v.dtype) if v.grad is None else v.grad for k, v in p.items()}
        for p in own
    ]


def with_cuts(layer: Any) -> Any:
    def loss_fn(params: Any, batch: Tensor) -> Tensor:
        y = batch
        for number, p in enumerate(params):
            y = layer(p, y) if number == 0 else layer(p, fpipe.cut(y))
        return loss(y, batch)

    return loss_fn


SCHEDULES = {
    "gpipe": fpipe.schedules.gpipe(ranks=4, microbatches=MICROBATCHES),
    "1f1b": fpipe.schedules.one_f_one_b(ranks=4, microbatches=MICROBATCHES),
    "zbv": fpipe.schedules.zbv(ranks=2, microbatches=MICROBATCHES),
}


def on_every_schedule(make_pipe: Any, expected: Any) -> None:
    """One trace serves all schedules."""
    pipe = make_pipe(schedule=SCHEDULES["gpipe"])
    for schedule in SCHEDULES.values():
        step = pipe.with_schedule(schedule).step(PARAMS, BATCH)
        torch.testing.assert_close(tuple(step), expected)


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_stages(layer: Any, remat: str) -> None:
    on_every_schedule(
        partial(fpipe.pipeline, [layer] * 4, loss, compile=False, remat=remat),
        expected_gradients(layer),
    )


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_cuts(layer: Any, remat: str) -> None:
    on_every_schedule(
        partial(fpipe.pipeline, with_cuts(layer), compile=False, remat=remat),
        expected_gradients(layer),
    )


@pytest.mark.parametrize("stages", [True, False])
def test_it_is_added_for_each_microbatch(stages: bool) -> None:
    """Nothing scales the gradient of such a loss, which is then that of a sum."""

    def layer(p: Any, x: Tensor) -> Tensor:
        return Auxiliary.apply(x, p["v"].square().sum())

    options: Any = {"schedule": SCHEDULES["1f1b"], "compile": False}
    if stages:
        pipe = fpipe.pipeline([layer] * 4, loss, **options)
    else:
        pipe = fpipe.pipeline(with_cuts(layer), **options)
    grads = pipe.step(PARAMS, BATCH).grads
    for p, gradient in zip(PARAMS, grads, strict=True):
        torch.testing.assert_close(gradient["v"], MICROBATCHES * 2 * p["v"])


def test_compiled() -> None:
    def stage(p: Any, x: Tensor) -> Tensor:
        return auxiliary(p, kept(p, penalised(p, x)))

    pipe = fpipe.pipeline([stage] * 4, loss, SCHEDULES["1f1b"], compile=laid_out)
    torch.testing.assert_close(tuple(pipe.step(PARAMS, BATCH)), expected_gradients(stage))
