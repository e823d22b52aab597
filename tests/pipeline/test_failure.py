"""A stage that fails while it runs, and numbers that are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from fpipe import Action, PipelineError, pytree, schedules
from tests.models import (
    assert_identical,
    assert_same,
    gpt,
    mlp,
    mlp_first,
    plain_pipeline,
    short_gpt,
    unpipelined,
)


def broken_tokens(batch: Any, row: int) -> Any:
    tokens = batch["tokens"].clone()
    tokens[row, 1] = 1000
    return batch | {"tokens": tokens}


def test_error_in_one_microbatch_names_it() -> None:
    model = gpt(2, 6)
    pipe = plain_pipeline(model.stages, model.loss, microbatches=3)
    with pytest.raises(
        PipelineError, match=r"^0F1 failed on rank 0 \(stage 0, microbatch 1\): Ind"
    ):
        pipe.step(model.params, broken_tokens(model.batch, 2))


def test_error_carries_where_and_why() -> None:
    def second(p: Any, x: Tensor) -> Tensor:
        table: Tensor = p["table"]
        return x + table[(x[:, 0] > 0).long() * 7].unsqueeze(1)

    x = -torch.ones(4, 3, dtype=torch.float64)
    x[3] = 1
    params = [None, {"table": torch.ones(2, dtype=torch.float64)}]
    schedule = schedules.one_f_one_b(ranks=2, microbatches=4)
    pipe = fpipe.pipeline(
        [lambda p, x: x * 2, second], lambda y, _: y.mean(), schedule, compile=False
    )
    with pytest.raises(PipelineError) as caught:
        pipe.step(params, x)
    error = caught.value
    assert (error.rank, error.stage, error.microbatch, error.action) == (1, 1, 3, "1F3")
    assert Action.parse(str(error.action)) in schedule.actions[1]
    assert isinstance(error.__cause__, IndexError)
    x[3] = -1
    assert_same(
        pipe.step(params, x), unpipelined([lambda p, x: x * 2, second], pipe_loss, params, x)
    )


def pipe_loss(y: Tensor, _: Any) -> Tensor:
    return y.mean()


class FailsBackward(torch.autograd.Function):
    """Its backward looks for columns that may not be there."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0].index_select(1, x[0].long())


def test_error_in_a_backward() -> None:
    x = torch.arange(3, dtype=torch.float64).expand(4, 3)
    broken = x.clone()
    broken[1] = 7
    stages = [lambda p, x: FailsBackward.apply(x * p), lambda p, x: x * p]
    params = [torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
    pipe = plain_pipeline(stages, pipe_loss, microbatches=4)
    with pytest.raises(PipelineError, match=r"^0W1 failed on rank 0 .*id=7"):
        pipe.step(params, broken)
    assert_same(pipe.step(params, x), unpipelined(stages, pipe_loss, params, x))


@pytest.mark.inductor
def test_index_out_of_range_is_caught_in_compiled_code() -> None:
    model = short_gpt(2)
    model = model._replace(stages=model.stages[:1], params=model.params[:1])  # the embedding
    pipe = plain_pipeline(model.stages, pipe_loss, compile=True)
    expected = pipe.value(model.params, model.batch)
    with pytest.raises(PipelineError, match=r"^0F1 failed on rank 0 \(stage 0, microbatch 1\)"):
        pipe.value(model.params, broken_tokens(model.batch, 1))
    assert_identical(pipe.value(model.params, model.batch), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_a_number_is_no_error_and_never_hidden(value: float) -> None:
    model = mlp(2, 6)
    x = model.batch["x"].clone()
    x[4, 1] = value
    batch = model.batch | {"x": x}
    pipe = plain_pipeline([affine_of_x, affine], microbatches=3)
    before = pipe.step(model.params, model.batch)
    step = pipe.step(model.params, batch)
    assert_identical(pipe.step(model.params, model.batch), before)  # nothing is left behind
    expected = unpipelined([affine_of_x, affine], model.loss, model.params, batch)
    for ours, theirs in zip(pytree.flatten(step)[0], pytree.flatten(expected)[0], strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert not step.loss.isfinite()


def affine_of_x(p: Any, batch: Any) -> Tensor:
    return batch["x"] @ p["w"] + p["b"]


def affine(p: Any, x: Tensor) -> Tensor:
    return x @ p["w"] + p["b"]


def test_not_a_number_in_a_parameter() -> None:
    model = mlp(2, 4)
    model.params[1]["b"][0] = float("nan")
    step = plain_pipeline(model.stages).step(model.params, model.batch)
    assert step.loss.isnan()
    assert step.grads[0]["w"].isnan().all()


def test_interrupt_leaves_nothing_behind() -> None:
    """An exception that is no `Exception`, such as Ctrl-C, passes as it is."""
    strike: list[bool] = []

    def compile(module: torch.fx.GraphModule, examples: Any) -> Any:
        def call(inputs: list[Tensor]) -> Any:
            if strike and len(inputs) > 3:
                raise KeyboardInterrupt
            return module(*inputs)

        return call

    model = mlp(2, 4)
    pipe = plain_pipeline([mlp_first, model.stages[1]], compile=compile)
    expected = pipe.step(model.params, model.batch)
    strike.append(True)
    with pytest.raises(KeyboardInterrupt):
        pipe.step(model.params, model.batch)
    strike.clear()
    assert_identical(pipe.step(model.params, model.batch), expected)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("goal", ["step", "value", "forward"])
def test_a_check_that_returns_nothing_still_runs(goal: str, split: bool) -> None:
    # Backward slices start at results, and would leave out what has none.
    def checked(p: Tensor, x: Tensor) -> Tensor:
        torch._assert_async((x < 3).all(), "too big")
        return x * p

    schedule = (schedules.zb_h1 if split else schedules.gpipe)(ranks=2, microbatches=2)
    pipe = fpipe.pipeline([checked, lambda p, x: x], pipe_loss, schedule, compile=False)
    params = [torch.ones(3, dtype=torch.float64), None]
    run = getattr(pipe, goal)
    x = torch.ones(4, 3, dtype=torch.float64)
    run(params, x)
    x[2] = 5
    with pytest.raises(PipelineError, match=r"^0F1 failed .*too big"):
        run(params, x)
