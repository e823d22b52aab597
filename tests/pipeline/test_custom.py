"""`torch.autograd.Function` in functions with cuts and in stages: its backward is the one used."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from tests.custom_model import (
    STAGES,
    Reversed,
    Wrong,
    WrongWithCtx,
    layer,
    make_batch,
    make_params,
    with_cuts,
)
from tests.models import assert_same

MICROBATCHES = 4


@pytest.fixture
def params() -> Any:
    return make_params()


@pytest.fixture
def batch() -> Any:
    return make_batch()


def expected(loss_fn: Any, params: Any, batch: Any) -> tuple[Tensor, Any]:
    own = [{k: v.clone().requires_grad_() for k, v in p.items()} for p in params]
    parts = zip(*(leaf.chunk(MICROBATCHES) for leaf in batch.values()), strict=True)
    losses = [loss_fn(own, dict(zip(batch, part, strict=True))) for part in parts]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.detach(), [{k: v.grad for k, v in p.items()} for p in own]


SCHEDULES = {
    "gpipe": fpipe.schedules.gpipe(ranks=STAGES, microbatches=MICROBATCHES),
    "1f1b": fpipe.schedules.one_f_one_b(ranks=STAGES, microbatches=MICROBATCHES),
    "zb_h1": fpipe.schedules.zb_h1(ranks=STAGES, microbatches=MICROBATCHES),
    "zbv": fpipe.schedules.zbv(ranks=STAGES // 2, microbatches=MICROBATCHES),
}


@pytest.mark.parametrize("function", [Wrong, WrongWithCtx])
@pytest.mark.parametrize("remat", ["none", "full", "except_last"])
def test_backward_is_the_function_s_own(function: Any, remat: Any, params: Any, batch: Any) -> None:
    loss_fn = functools.partial(with_cuts, function)
    pipe = fpipe.pipeline(loss_fn, schedule=SCHEDULES["gpipe"], compile=False, remat=remat)
    whole = expected(loss_fn, params, batch)
    for schedule in SCHEDULES.values():
        found = pipe.with_schedule(schedule).step(params, batch)
        torch.testing.assert_close(tuple(found), whole)
    torch.testing.assert_close(pipe.value(params, batch), whole[0])


@pytest.mark.inductor
def test_compiled(params: Any, batch: Any) -> None:
    loss_fn = functools.partial(with_cuts, WrongWithCtx)
    pipe = fpipe.pipeline(loss_fn, schedule=SCHEDULES["1f1b"])
    torch.testing.assert_close(tuple(pipe.step(params, batch)), expected(loss_fn, params, batch))


def test_functions_whose_forward_takes_ctx_in_stages(params: Any, batch: Any) -> None:
    def stage(p: Any, given: Any) -> Any:
        return {**given, "x": layer(WrongWithCtx, p, given["x"], given["index"], 2)}

    def loss(y: Any, batch: Any) -> Tensor:
        return y["x"].square().mean()

    pipe = fpipe.pipeline([stage] * STAGES, loss, SCHEDULES["zb_h1"], compile=False)

    def unpipelined(params: Any, batch: Any) -> Tensor:
        given = batch
        for p in params:
            given = stage(p, given)
        return loss(given, batch)

    torch.testing.assert_close(
        tuple(pipe.step(params, batch)), expected(unpipelined, params, batch)
    )


class Backward(torch.autograd.Function):
    """Writes in place to what its backward makes, or to what that is given."""

    @staticmethod
    def forward(x: Tensor, own: bool) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.own = inputs[1]
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        given = grads[0].clone() if ctx.own else grads[0]
        return given.mul_(3).mul_(ctx.saved_tensors[0]), None


def steps_with_writes(own: bool) -> Any:
    def stage(p: Tensor, x: Tensor) -> Tensor:
        return Backward.apply((x * p).relu_(), own)

    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=2)
    pipe = fpipe.pipeline([stage, stage], lambda y, b: y.sum(), schedule, compile=False)
    return pipe.step([torch.tensor(1.0), torch.tensor(2.0)], torch.ones(4))


def test_in_place_operations_beside_a_function() -> None:
    # functionalize does not know the Function, and tracing without it left them: it was refused.
    assert [grad.tolist() for grad in steps_with_writes(own=True).grads] == [2 * 36.0, 2 * 6.0]


def test_write_to_what_a_backward_is_given_is_refused() -> None:
    with pytest.raises(fpipe.StageError, match=r"stage \d .* writes .* the backward .* is given"):
        steps_with_writes(own=False)


def first_and_second(loss_fn: Any, **options: Any) -> Any:
    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False, **options)
    w = torch.full((3,), 1.5, dtype=torch.float64)
    return pipe.step(w, torch.arange(12.0, dtype=torch.float64).reshape(4, 3))


class Scaled(torch.autograd.Function):
    """A product whose gradient is that of another one."""

    factor = 2.0

    @staticmethod
    def forward(x: Tensor, factor: Any) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor, None


scaled = Scaled.apply
reversed_apply = Reversed.apply


@pytest.mark.parametrize("factor", [1, 5.0, True])
def test_kept_apply(factor: Any) -> None:
    found = first_and_second(lambda w, x: fpipe.cut(scaled(w * x, factor)).mean())
    assert found.grads.tolist() == pytest.approx([factor * c / 3 for c in (4.5, 5.5, 6.5)])


def test_layers_that_differ_in_a_plain_argument_are_not_alike() -> None:
    schedule = fpipe.schedules.gpipe(ranks=3, microbatches=1)

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        x = fpipe.cut(scaled(x * w[0], 1))
        x = fpipe.cut(scaled(x * w[1], True))
        return scaled(x * w[2], 3.0).sum()

    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    w = torch.ones(3, dtype=torch.float64)
    x = torch.ones(1, dtype=torch.float64)
    # Each factor but the forward's, of all that come behind a parameter, and the forward's before.
    assert pipe.step(w, x).grads.tolist() == [3.0, 2 * 3.0, 4 * 3.0]


def test_within_no_grad_it_has_no_gradient() -> None:
    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = scaled(w, 7.0)
        return (fpipe.cut(gate * x) * w).mean()

    # Of 2w * x * w by the second w alone.
    assert first_and_second(loss_fn).grads.tolist() == pytest.approx(
        [2 * 1.5 * c / 3 for c in (4.5, 5.5, 6.5)]
    )


def test_what_is_not_trained_gets_no_gradient(params: Any, batch: Any) -> None:
    loss_fn = functools.partial(with_cuts, Wrong)
    pipe = fpipe.pipeline(
        loss_fn,
        schedule=SCHEDULES["zb_h1"],
        compile=False,
        trainable=[{"w": True, "b": False, "v": True} for _ in range(STAGES)],
    )
    _, grads = expected(loss_fn, params, batch)
    for found, wanted in zip(pipe.step(params, batch).grads, grads, strict=True):
        assert found["b"] is None
        torch.testing.assert_close((found["w"], found["v"]), (wanted["w"], wanted["v"]))


class Product(torch.autograd.Function):
    """Tells by its gradient in which dtype it was computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        ctx.size = y.element_size()
        return y.float()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0].sum() * ctx.size * torch.ones(3, 3)


@pytest.mark.parametrize("cast", [True, False])
def test_autocast_around_a_call(cast: bool) -> None:
    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            y = Product.apply(x, w)
        return fpipe.cut(y).sum()

    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=1)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=not cast):
        found = pipe.step(torch.ones(3, 3), torch.ones(2, 3))
    assert found.grads[0, 0] == 6 * (2 if cast else 4)


# ── what is refused ─────────────────────────────────────────────────────────────────────────────


class Writes(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.mul_(2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_dirty(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


class Draws(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Lists(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return [x * 2]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Marks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class KeepsAFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.gradient = lambda g: g * x
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.gradient(grads[0])


class Counts(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Counts.calls += 1
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class HasScale(torch.autograd.Function):
    scale = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * HasScale.scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * HasScale.scale


def closing_over(w: Tensor, x: Tensor) -> Tensor:
    class Closing(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * w

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0]

    return fpipe.cut(Closing.apply(x)).mean()


def closing_over_backward(w: Tensor, x: Tensor) -> Tensor:
    class Closing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * w

    return fpipe.cut(Closing.apply(x * w)).mean()


def mapped(w: Tensor, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: fpipe.cut(scaled(row * w, 1.0)))(x).mean()


@pytest.mark.parametrize(
    ("loss_fn", "rule"),
    [
        (lambda w, x: fpipe.cut(Writes.apply(x * w)).mean(), r"Writes.* writes in place to"),
        (lambda w, x: fpipe.cut(Writes.apply(x * 1) * w).mean(), r"Writes.* writes in place to"),
        (lambda w, x: fpipe.cut(Draws.apply(x * w)).mean(), r"Draws.* that draws .*rand_like"),
        (lambda w, x: fpipe.cut(Lists.apply(x * w)[0]).mean(), r"gets a list of tensors from"),
        (lambda w, x: fpipe.cut(Marks.apply(x * w)).mean(), r"writes to its arguments"),
        (lambda w, x: fpipe.cut(KeepsAFunction.apply(x * w)).mean(), r"sets ctx\.gradient to a"),
        (lambda w, x: fpipe.cut(Counts.apply(x * w)).mean(), r"changes attributes of .*Counts"),
        (closing_over, r"closes over a tensor which depends on the parameters"),
        (closing_over_backward, r"closes over an abstract tensor"),
        (mapped, r"within a transform of torch\.func or of the pipeline at .*test_custom\.py:"),
        (
            lambda w, x: fpipe.cut(scaled(x * w, lambda: 2)).mean(),
            r"gives a function to .*Scaled.* at .*test_custom\.py:\d+: tensors that it holds",
        ),
        (
            lambda w, x: fpipe.cut(scaled(x * w, torch.nn.ReLU())).mean(),
            r"gives a ReLU to .*Scaled",
        ),
        (
            lambda w, x: fpipe.cut(reversed_apply(x * w, 2.0)).mean(),
            r"forward takes ctx .* at .*test_custom\.py:\d+: .*Class\.apply",
        ),
    ],
)
def test_what_would_be_lost_is_refused(loss_fn: Any, rule: str) -> None:
    with pytest.raises(fpipe.StageError, match=rule):
        first_and_second(loss_fn)


def test_attributes_of_a_class_that_differ_between_layers_are_refused() -> None:
    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        # The third layer is like the second but for that, and it is the same in the end.
        for scale in (1.0, 1.0, 2.0, 1.0):
            HasScale.scale = scale
            x = fpipe.cut(HasScale.apply(x * w))
        return x.mean()

    schedule = fpipe.schedules.gpipe(ranks=5, microbatches=2)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    with pytest.raises(fpipe.StageError, match=r"changes attributes of .*HasScale"):
        pipe.step(torch.ones(3), torch.ones(4, 3))


def test_transform_of_the_pipeline_is_refused() -> None:
    pipe = fpipe.pipeline(
        lambda w, x: fpipe.cut(scaled(x * w, 1.0)).mean(),
        schedule=fpipe.schedules.gpipe(ranks=2, microbatches=2),
        compile=False,
    )
    w, x = torch.ones(3), torch.ones(4, 3)
    with pytest.raises(fpipe.StageError, match=r"Scaled.* within a transform of torch\.func or of"):
        fpipe.per_example_grads(pipe).step(w, x)
    with pytest.raises(fpipe.StageError, match=r"Scaled.* within a transform of torch\.func or of"):
        fpipe.hvp(pipe).step(w, x, w)


class Ready(torch.autograd.Function):
    """Its forward makes the gradient, which its backward returns as it was saved."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """A sum of sines, and its gradient."""
        y = x @ w
        return y.sin().sum(), y.cos() @ w.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep what the backward returns."""
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        """The gradient that was made, whatever it is of."""
        return ctx.saved_tensors[0], None


def test_backward_that_returns_what_was_saved() -> None:
    eye = torch.eye(3, dtype=torch.float64)

    def last(p: Tensor, h: Tensor) -> Tensor:
        return Ready.apply(h, eye)[0] * p

    def loss_fn(params: list[Tensor], x: Tensor) -> Tensor:
        return last(params[1], fpipe.cut(x * params[0]))

    params = [torch.tensor(v, dtype=torch.float64) for v in (2.0, 3.0)]
    x = torch.ones(3, 3, dtype=torch.float64)
    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=1)
    grads, loss = torch.func.grad_and_value(loss_fn)(params, x)
    stages = fpipe.pipeline([lambda p, x: x * p, last], lambda y, _: y, schedule, compile=False)
    for pipe in (stages, fpipe.pipeline(loss_fn, schedule=schedule, compile=False)):
        step = pipe.step(params, x)
        assert_same(step.loss, loss)
        assert_same(step.grads, grads)
