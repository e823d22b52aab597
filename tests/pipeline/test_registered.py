"""Operations of `torch.library` with a registered backward: it is the one that is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpipe
from tests.models import rand


@torch.library.custom_op("fpipe_tests::scaled", mutates_args=())
def scaled(x: Tensor, w: Tensor, factor: float = 2.0) -> Tensor:
    return x * w * factor


@scaled.register_fake
def _(x: Tensor, w: Tensor, factor: float = 2.0) -> Tensor:
    return torch.empty_like(x)


def keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, w, ctx.factor = inputs
    ctx.save_for_backward(x, w)


def back(ctx: Any, g: Tensor) -> Any:
    """Three times what it would be, to tell it from the derivative."""
    x, w = ctx.saved_tensors
    return 3 * g * w * ctx.factor, (g * x).sum(0) * ctx.factor, None


scaled.register_autograd(back, setup_context=keep)


@torch.library.custom_op("fpipe_tests::waves", mutates_args=())
def waves(x: Tensor, *, shift: float) -> tuple[Tensor, Tensor]:
    return (x + shift).sin(), (x + shift).cos()


@waves.register_fake
def _(x: Tensor, *, shift: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def keep_waves(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output)


def back_waves(ctx: Any, g: Tensor, h: Tensor) -> Tensor:
    sine, cosine = ctx.saved_tensors
    back: Tensor = g * cosine - h * sine
    return back


waves.register_autograd(back_waves, setup_context=keep_waves)


@torch.library.custom_op("fpipe_tests::quantised", mutates_args=())
def quantised(x: Tensor) -> Tensor:
    return (x * 4).round() / 4


@quantised.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


quantised.register_autograd(lambda ctx, g: g)


@torch.library.custom_op("fpipe_tests::listed", mutates_args=())
def listed(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


@listed.register_fake
def _(xs: list[Tensor]) -> Tensor:
    return torch.empty_like(xs[0])


listed.register_autograd(
    lambda ctx, g: [g] * ctx.count,
    setup_context=lambda ctx, inputs, output: setattr(ctx, "count", len(inputs[0])),
)


def layer(p: Any, x: Tensor) -> Tensor:
    y = scaled(x @ quantised(p["w"]), p["v"])
    sine, cosine = waves(y, shift=0.5)
    return sine + cosine.square() + quantised(y.detach())


PARAMS = [{"w": (n + 1) / 2 * rand(3, 3), "v": rand(3) + n} for n in range(4)]
BATCH = rand(8, 3)


def loss(y: Tensor, _: Tensor) -> Tensor:
    return y.square().mean()


def with_cuts(layer: Any) -> Callable[[Any, Tensor], Tensor]:
    def loss_fn(params: Any, batch: Tensor) -> Tensor:
        x = batch
        for number, p in enumerate(params):
            x = layer(p, x if number == 0 else fpipe.cut(x))
        return loss(x, batch)

    return loss_fn


def expected(layer: Any) -> Any:
    own = [{k: v.clone().requires_grad_() for k, v in p.items()} for p in PARAMS]
    value = torch.stack([with_cuts(layer)(own, part) for part in BATCH.chunk(4)]).mean()
    value.backward()
    return value.detach(), [{k: v.grad for k, v in p.items()} for p in own]


def make(layer: Any, cut: bool, schedule: Any, **options: Any) -> Any:
    if cut:
        return fpipe.pipeline(with_cuts(layer), schedule=schedule, **options)
    return fpipe.pipeline([layer] * len(PARAMS), loss, schedule, **options)


ZBV = fpipe.schedules.zbv(ranks=2, microbatches=4)
GPIPE = fpipe.schedules.gpipe(ranks=4, microbatches=4)


@pytest.mark.parametrize(
    ("cut", "schedule", "remat"),
    [(True, ZBV, "full"), (False, GPIPE, "none"), (False, ZBV, "full")],
)
def test_loss_and_gradients(cut: bool, schedule: Any, remat: Any) -> None:
    pipe = make(layer, cut, schedule, remat=remat, compile=False)
    found = pipe.step(PARAMS, BATCH)
    torch.testing.assert_close(tuple(found), expected(layer))
    torch.testing.assert_close(pipe.value(PARAMS, BATCH), found.loss)


@pytest.mark.inductor
@pytest.mark.parametrize("cut", [True, False])
def test_compiled(cut: bool) -> None:
    found = make(layer, cut, ZBV).step(PARAMS, BATCH)
    torch.testing.assert_close(tuple(found), expected(layer))


def slope(p: Any, x: Tensor) -> Tensor:
    """The derivative of a layer, by its input."""
    return torch.func.grad(lambda x: layer(p, x).sum())(x) + x


def slopes(p: Any, x: Tensor) -> Tensor:
    """The same, row by row."""
    return torch.func.vmap(torch.func.grad(lambda x: layer(p, x[None]).sum()))(x) + x


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("layer", [slope, slopes])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_derivatives_within(layer: Any, cut: bool) -> None:
    found = make(layer, cut, GPIPE, compile=False).step(PARAMS, BATCH)
    own = [{k: v.clone().requires_grad_() for k, v in p.items()} for p in PARAMS]
    x = BATCH
    for p in own:
        leaf = x if x.requires_grad else x.clone().requires_grad_()
        outer = globals()["layer"](p, leaf)
        x = torch.autograd.grad(outer.sum(), leaf, create_graph=True)[0] + leaf
    value = loss(x, BATCH)
    grads = torch.autograd.grad(value, [v for p in own for v in p.values()])
    torch.testing.assert_close(found.loss, value.detach())
    torch.testing.assert_close([v for p in found.grads for v in p.values()], list(grads))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch 2.14 says so of its loop
def test_single_examples() -> None:
    pipe = fpipe.per_example_grads(make(layer, True, GPIPE, compile=False))
    rows = pipe.step(PARAMS, BATCH).grads
    for row, x in enumerate(BATCH):
        own = [{k: v.clone().requires_grad_() for k, v in p.items()} for p in PARAMS]
        with_cuts(layer)(own, x[None]).backward()
        for p, found in zip(own, rows, strict=True):
            torch.testing.assert_close(found["w"][row], p["w"].grad)


@pytest.mark.parametrize("cut", [True, False])
def test_derivative_in_a_direction_is_refused(cut: bool) -> None:
    pipe = make(layer, cut, GPIPE, compile=False)
    rule = r"calls an operation of torch\.library .* \(jvp\) at .*test_registered\.py:\d+: torch"
    with pytest.raises(fpipe.StageError, match=rule):
        fpipe.hvp(pipe).step(PARAMS, BATCH, PARAMS)
    with pytest.raises(fpipe.StageError, match=rule):
        torch.func.jvp(lambda x: pipe.value(PARAMS, x), (BATCH,), (BATCH,))

    def constant(p: Any, x: Tensor) -> Tensor:
        """Not differentiated in that direction."""
        y = layer(p, x)
        return torch.func.jvp(lambda x: x * y, (x,), (x,))[1]

    found = make(constant, cut, GPIPE, compile=False).step(PARAMS, BATCH)
    torch.testing.assert_close(tuple(found), expected(constant))


@pytest.mark.parametrize(
    ("cut", "schedule", "remat"), [(True, ZBV, "none"), (False, GPIPE, "full")]
)
def test_lists_of_tensors(cut: bool, schedule: Any, remat: Any) -> None:
    # torch makes a Function of it whose forward takes ctx: it was refused.
    def layer(p: Any, x: Tensor) -> Tensor:
        return listed([x @ p["w"], x * p["v"]])

    found = make(layer, cut, schedule, compile=False, remat=remat).step(PARAMS, BATCH)
    torch.testing.assert_close(tuple(found), expected(layer))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + scaled(quantised(self.linear(x)), self.gain, 0.5)


def test_module() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Layer(), Layer()).double()
    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=4)
    pipe = fpipe.from_module(
        module, schedule=schedule, cuts=["0"], loss=lambda y, _: y.square().mean(), compile=False
    )
    params = {name: p.detach() for name, p in module.named_parameters()}
    found = pipe.step(params, {"input": BATCH})
    torch.stack([module(part).square().mean() for part in BATCH.chunk(4)]).mean().backward()
    torch.testing.assert_close(found.grads, {name: p.grad for name, p in module.named_parameters()})


@pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyOptions"), reason="came to torch with version 2.13"
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunked_cross_entropy(reduction: str) -> None:
    target = torch.arange(8) % 5
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=2, allow_retain_graph=True)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        x = fpipe.cut(batch["x"] @ params["a"])
        given = x, params["b"], batch["y"]
        return F.linear_cross_entropy(*given, options=options, reduction=reduction).mean()

    params = {"a": rand(3, 3), "b": rand(5, 3)}
    own = {k: v.clone().requires_grad_() for k, v in params.items()}
    value = F.cross_entropy(BATCH @ own["a"] @ own["b"].T, target, reduction=reduction).mean()
    value = value / 2 if reduction == "sum" else value  # the mean over microbatches
    value.backward()
    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    found = pipe.step(params, {"x": BATCH, "y": target})
    torch.testing.assert_close(found.loss, value.detach())
    torch.testing.assert_close(found.grads, {k: v.grad for k, v in own.items()})


def test_an_operation_may_be_named_as_what_a_program_is_given() -> None:
    # What a node named "batch" computed compared equal to a leaf of the batch, and took its slot.
    library = torch.library.Library("fpipe_tests", "FRAGMENT")
    library.define("batch(Tensor x) -> Tensor")
    library.impl("batch", lambda x: 2 * x, "CompositeExplicitAutograd")
    torch.library.register_fake("fpipe_tests::batch", torch.empty_like, lib=library)

    def first(w: Tensor, x: Tensor) -> Any:
        return torch.ops.fpipe_tests.batch(x.detach()), x * w

    def last(w: Tensor, x: Any) -> Tensor:
        return x[0] + x[1] * w

    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=2)
    pipe = fpipe.pipeline([first, last], lambda y, b: (y * b).mean(), schedule, compile=False)
    params, batch = [torch.tensor(2.0), torch.tensor(3.0)], torch.arange(1.0, 5.0)
    loss, _ = pipe.step(params, batch)
    torch.testing.assert_close(loss, (8 * batch * batch).mean())
