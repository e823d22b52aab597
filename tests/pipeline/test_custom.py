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
from tests.eager import check_stages, eager
from tests.laid_out import laid_out
from tests.models import assert_same, rand

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


@pytest.mark.parametrize(
    ("function", "remat"),
    [(WrongWithCtx, "none"), (Wrong, "full"), (WrongWithCtx, "full"), (Wrong, "except_last")],
)
def test_backward_is_the_function_s_own(function: Any, remat: Any, params: Any, batch: Any) -> None:
    loss_fn = functools.partial(with_cuts, function)
    pipe = fpipe.pipeline(loss_fn, schedule=SCHEDULES["gpipe"], compile=False, remat=remat)
    whole = expected(loss_fn, params, batch)
    for schedule in SCHEDULES.values():
        found = pipe.with_schedule(schedule).step(params, batch)
        torch.testing.assert_close(tuple(found), whole)
    torch.testing.assert_close(pipe.value(params, batch), whole[0])


def test_compiled(params: Any, batch: Any) -> None:
    loss_fn = functools.partial(with_cuts, WrongWithCtx)
    pipe = fpipe.pipeline(loss_fn, schedule=SCHEDULES["1f1b"], compile=laid_out)
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


def with_writes(own: bool) -> Any:
    return lambda p, x: Backward.apply((x * p).relu_(), own)


SCALES = [torch.tensor(1.0, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)]


def test_in_place_operations_beside_a_function() -> None:
    # functionalize does not know the Function, and tracing without it left them: it was refused.
    check_stages([with_writes(own=True)] * 2, SCALES, rand(4, 3))


def test_write_to_what_a_backward_is_given() -> None:
    # Recorded apart from autograd, it was a write to what is not the stage's: it was refused.
    check_stages([with_writes(own=False)] * 2, SCALES, rand(4, 3))


@pytest.mark.parametrize("cut", [True, False])
def test_write_to_a_gradient_whose_elements_are_one_is_refused(cut: bool) -> None:
    """That of a sum is expanded; autograd refuses the write, too."""
    stage = with_writes(own=False)

    def loss_fn(params: Any, batch: Tensor) -> Tensor:
        return stage(params[1], fpipe.cut(stage(params[0], batch))).sum()

    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        eager(loss_fn, SCALES, rand(4, 3))
    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=2)
    if cut:
        pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    else:
        pipe = fpipe.pipeline([stage, stage], lambda y, b: y.sum(), schedule, compile=False)
    with pytest.raises(
        fpipe.StageError, match=r"several elements are one .* at .*test_custom\.py:\d+: "
    ):
        pipe.step(SCALES, rand(4, 3))


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


# ── what was refused, before functions ran under autograd ───────────────────────────────────────


class Writes(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.mul_(2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_dirty(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3


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
        return grads[0] * 3


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
        ctx.scale = HasScale.scale
        return x * HasScale.scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.scale * 3


class Calls(torch.autograd.Function):
    """Calls what it is given beside a tensor."""

    @staticmethod
    def forward(x: Tensor, function: Any) -> Tensor:
        made: Tensor = function(x)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.function = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.function(grads[0]) * 2, None


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

    made: Tensor = Closing.apply(x)
    return made


def closing_over_backward(w: Tensor, x: Tensor) -> Tensor:
    class Closing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * w

    made: Tensor = Closing.apply(x * w)
    return made


@pytest.mark.parametrize(
    "stage",
    [
        lambda w, x: Writes.apply(x * w),
        lambda w, x: Writes.apply(x * 1) * w,
        lambda w, x: Lists.apply(x * w)[0] * w,
        lambda w, x: Marks.apply(x * w),
        lambda w, x: KeepsAFunction.apply(x * w),
        lambda w, x: Counts.apply(x * w),
        closing_over,
        closing_over_backward,
        lambda w, x: Calls.apply(x * w, lambda y: y.clamp(-0.1, 0.1)),
        lambda w, x: Calls.apply(x * w, torch.nn.ReLU()),
        lambda w, x: reversed_apply(x * w, 2.0),
    ],
    ids=[
        *("writes to a value", "writes to an argument", "a list", "marks", "keeps a function"),
        *("counts", "closing over", "closing over in the backward", "a function", "a module"),
        "by a name, with ctx",
    ],
)
def test_what_autograd_takes_is_taken(stage: Any) -> None:
    # torch.func took none of these, or would have lost the gradient: they were refused.
    check_stages([lambda w, x: (x * w).tanh(), stage], [rand(3), rand(3).cos()], rand(4, 3))


class Draws(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.drawn = torch.rand_like(x)
        return x * ctx.drawn

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.drawn * 5


@pytest.mark.parametrize("remat", ["none", "full"])
def test_function_that_draws(remat: str) -> None:
    """The backward has what the forward drew: of a loss linear in w, sum(w * gradient) is it."""
    loss, grads = first_and_second(lambda w, x: fpipe.cut(Draws.apply(x * w)).mean(), remat=remat)
    assert_same((grads * 1.5).sum(), 5 * loss)
    assert 0 < loss < 1.5 * 5.5


@pytest.mark.parametrize("given", [lambda: 2, torch.nn.ReLU()])
def test_backward_that_fails_is_refused_at_its_line(given: Any) -> None:
    with pytest.raises(fpipe.StageError, match=r"at .*test_custom\.py:\d+: TypeError: unsupported"):
        first_and_second(lambda w, x: fpipe.cut(scaled(x * w, given)).mean())


def test_function_without_a_rule_for_vmap_is_refused_by_name() -> None:
    def mapped(w: Tensor, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: fpipe.cut(scaled(row * w, 1.0)))(x).mean()

    with pytest.raises(fpipe.StageError, match=r"calls .*Scaled, .* that has no rule for vmap"):
        first_and_second(mapped)


def test_attributes_of_a_class_that_differ_between_layers() -> None:
    # Layers that are alike but for those shared a trace: it was refused.
    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        # The third layer is like the second but for that, and it is the same in the end.
        for scale in (1.0, 1.0, 2.0, 1.0):
            HasScale.scale = scale
            x = fpipe.cut(HasScale.apply(x * w))
        return x.square().mean()

    w, x = rand(3), rand(4, 3)
    expected = eager(loss_fn, w, x)
    schedule = fpipe.schedules.gpipe(ranks=5, microbatches=2)
    for remat in ("none", "full"):
        pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False, remat=remat)
        assert_same(pipe.step(w, x), expected)


def test_transforms_of_the_pipeline_that_the_function_has_no_rule_for_are_refused() -> None:
    pipe = fpipe.pipeline(
        lambda w, x: fpipe.cut(scaled(x * w, 1.0)).mean(),
        schedule=fpipe.schedules.gpipe(ranks=2, microbatches=2),
        compile=False,
    )
    w, x = torch.ones(3), torch.ones(4, 3)
    rule = r"calls .*Scaled, .* at .*test_custom\.py:\d+"
    with pytest.raises(fpipe.StageError, match=rule):
        fpipe.per_example_grads(pipe).step(w, x)
    with pytest.raises(fpipe.StageError, match=rule):
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
