"""Modules with a `torch.autograd.Function`: its backward is the one used, in every layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe import random
from fpipe.divide.function_tracer import FunctionTracer
from fpipe.inputs.signature import TreeShape
from fpipe.modules.module_loss import ModuleLoss
from fpipe.pytree import flatten
from fpipe.spec.objective import Objective
from tests.models import assert_identical
from tests.modules.helpers import (
    assert_equal_steps,
    by_microbatches,
    detached,
    module_pipe,
    squares,
)
from tests.modules.hugging_face import LIBRARY, cross_entropy

WIDTH = 6


class Rounded(torch.autograd.Function):
    """Straight through, but for what was clamped, with a scale that learns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, bits: int) -> Tensor:
        top = 2.0 ** (bits - 1) - 1
        scaled = x / scale
        ctx.save_for_backward(scaled)
        ctx.top = top
        return scaled.round().clamp_(-top, top) * scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (scaled,) = ctx.saved_tensors
        inside = scaled.abs() <= ctx.top
        return grads[0] * inside, (grads[0] * (scaled.round() - scaled)).sum().view(1), None


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = x @ weight.t()
        return y if bias is None else y.add_(bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        bias = grads[0].sum(0) if ctx.needs_input_grad[2] else None
        return grads[0] @ weight * 0.7, grads[0].t() @ x * 3, bias


class Layer(nn.Module):
    def __init__(self, bits: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=bits > 2)
        self.scale = nn.Parameter(torch.full((1,), 0.25))
        self.bits = bits

    def forward(self, x: Tensor) -> Tensor:
        weight = Rounded.apply(self.linear.weight, self.scale, self.bits)
        return x + torch.tanh(
            Linear.apply(Rounded.apply(x, self.scale, 4), weight, self.linear.bias)
        )


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(bits) for bits in (3, 3, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def custom_batch(rows: int = 8) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(rows, WIDTH, dtype=torch.float64)}


CUTS = ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(
    "schedule",
    [
        fpipe.schedules.one_f_one_b(ranks=4, microbatches=4),
        fpipe.schedules.zbv(ranks=2, microbatches=4),
    ],
    ids=lambda schedule: schedule.name,
)
def test_quantised_model_equals_itself_unpipelined(
    model: Model, schedule: fpipe.Schedule, remat: Any
) -> None:
    batch = custom_batch()
    pipe = module_pipe(model, CUTS, schedule=schedule, remat=remat)
    assert_equal_steps(pipe.step(detached(model), batch), by_microbatches(model, batch, 4))


def test_layers_with_the_same_calls_are_alike(model: Model) -> None:
    params, spec = flatten(detached(model))
    batch, batch_spec = flatten(custom_batch(2))
    tracer = FunctionTracer(ModuleLoss(model, CUTS, squares), 4, Objective())
    shape = TreeShape.of(spec, params)
    chain = tracer([shape] * 4, TreeShape.of(batch_spec, batch), "step", 2)
    _, second, third, last = (stage.joint for stage in chain.stages)
    assert second.graph is third.graph and last.graph is not second.graph


def test_work_within_a_function_counts_where_cuts_are_chosen(model: Model) -> None:
    balance = fpipe.balance(
        model.to("meta"),
        fpipe.schedules.one_f_one_b(ranks=2, microbatches=2),
        {"x": torch.ones(8, WIDTH, device="meta")},
        loss=squares,
        intensity=0,
    )
    assert balance.cuts == ("layers.1",)
    assert [stage.flops for stage in balance.stages] == [2 * 2 * 4 * WIDTH * WIDTH] * 2


def test_bloom_equals_itself_unpipelined() -> None:
    config = LIBRARY.BloomConfig(
        vocab_size=31, hidden_size=16, n_layer=4, n_head=2, hidden_dropout=0.0,
        attention_dropout=0.0, bos_token_id=1, eos_token_id=2, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LIBRARY.BloomForCausalLM(config).double().train()  # its Function is for training
    batch = {"input_ids": torch.randint(31, (4, 7)), "labels": torch.randint(31, (4, 7))}
    pipe = module_pipe(
        model,
        [f"transformer.h.{number}" for number in range(3)],
        schedule=fpipe.schedules.zb_h1(ranks=4, microbatches=2),
        loss=cross_entropy,
    )
    step = pipe.step(detached(model), batch)
    expected = by_microbatches(model, batch, loss=cross_entropy)
    torch.testing.assert_close(tuple(step), tuple(expected))


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] + torch.rand_like(grads[0])


class WithNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Noisy.apply(self.layer(x)) * 2


def test_backward_that_draws_has_the_same_numbers_in_each_schedule() -> None:
    """Under a key. It was refused: what a backward draws was recorded apart."""
    torch.manual_seed(0)
    blocks = [WithNoise().double(), WithNoise().double()]
    module = nn.Sequential(*blocks)
    batch = {"input": custom_batch()["x"]}

    def step(key: int, schedule: str, remat: Any = "none") -> fpipe.Step:
        pipe = module_pipe(
            module,
            "0",
            schedule=getattr(fpipe.schedules, schedule)(ranks=2, microbatches=4),
            has_key=True,
            remat=remat,
        )
        return pipe.step(detached(module), batch, key=random.key(key))

    first = step(0, "gpipe")
    assert_identical(step(0, "zb_h1"), first)
    assert_identical(step(0, "gpipe", "full"), first)
    bias = "1.layer.bias"
    assert not step(1, "gpipe").grads[bias].equal(first.grads[bias])
    # Of each row a number between 0 and 1.
    silent = nn.Sequential(blocks[0], blocks[1].layer)
    expected = by_microbatches(silent, batch, 4, loss=lambda y, _: squares(y * 2, {}))
    noise = first.grads[bias] - expected.grads["1.bias"]
    assert bool(((noise > 0) & (noise < 8)).all()) and noise.unique().numel() == WIDTH


class AddAuxiliary(torch.autograd.Function):
    """As DeepSeek's models add the loss of their router: it gets a gradient of one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        ctx.required = loss.requires_grad
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, torch.ones(1, dtype=ctx.dtype, device=g.device) if ctx.required else None


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.linear = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        loss = 0.1 * shares.mean(0).square().sum()
        output: Tensor = AddAuxiliary.apply(self.linear(x) * shares[:, :1], loss)
        return output


@pytest.mark.parametrize("microbatches", [1, 4])
def test_loss_that_a_backward_adds(microbatches: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Routed(), Routed()).double()
    pipe = module_pipe(
        module, "0", schedule=fpipe.schedules.gpipe(ranks=2, microbatches=microbatches)
    )
    x = custom_batch()["x"]
    expected = by_microbatches(module, {"input": x}, microbatches)
    assert_equal_steps(pipe.step(detached(module), {"input": x}), expected)
