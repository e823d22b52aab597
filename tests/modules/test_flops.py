"""FLOPs of operations that torch's counter does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fpipe
from tests.modules.helpers import total

HEADS, LENGTH, WIDTH = 2, 16, 8
SCHEDULE = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def flops_of(layer: nn.Module, x: Tensor) -> int:
    """FLOPs of a layer, for one of two microbatches; the layer before it has none."""
    module = nn.Sequential(nn.Tanh(), layer)
    balance = fpipe.balance(module, SCHEDULE, {"input": x}, loss=total, candidates=["0"])
    return balance.stages[1].flops


def attention(x: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, **options)


class Twice(torch.autograd.Function):
    """Attention with a backward of its own."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return attention(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "function",
    [
        attention,
        lambda x: attention(x, is_causal=True),
        lambda x: attention(x, attn_mask=x.new_ones(LENGTH, LENGTH)),
        Twice.apply,
    ],
    ids=["whole", "causal", "masked", "custom"],
)
def test_attention_counts(function: Callable[[Tensor], Tensor], device: str) -> None:
    """A recording on the CPU calls a kernel that torch's counter lacks; it once counted as 0."""
    x = torch.ones(4, HEADS, LENGTH, WIDTH, device=device)
    with FlopCounterMode(display=False) as counter:
        attention(x[:2].to("meta"))
    flops = flops_of(Function(function), x)
    assert flops == counter.get_total_flops() == 2 * HEADS * 2 * 2 * LENGTH**2 * WIDTH


def test_keys_that_several_queries_share_count_for_each() -> None:
    def grouped(x: Tensor) -> Tensor:
        few = x[:, ::HEADS]
        return F.scaled_dot_product_attention(x, few, few, enable_gqa=True)

    x = torch.ones(4, HEADS, LENGTH, WIDTH)
    assert flops_of(Function(grouped), x) == flops_of(Function(attention), x)


def test_the_backward_of_attention_counts_where_a_forward_has_one() -> None:
    def slope(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: attention(y).sum())(x)

    x = torch.ones(4, HEADS, LENGTH, WIDTH)
    # Two products forward; the backward makes the first again, and four more.
    assert 2 * flops_of(Function(slope), x) == 7 * flops_of(Function(attention), x)


class Recurrent(nn.Module):
    """An LSTM's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 4, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.lstm(x)
        assert isinstance(output, Tensor)
        return output


def test_recurrent_layers_count() -> None:
    layer = Recurrent()
    flops = flops_of(layer, torch.ones(4, LENGTH, WIDTH))
    weights = sum(p.numel() for name, p in layer.named_parameters() if "weight" in name)
    assert flops == 2 * 2 * LENGTH * weights


def test_products_of_groups_and_of_integers_count() -> None:
    def grouped(x: Tensor) -> Tensor:
        ends = torch.tensor([3, LENGTH], dtype=torch.int32)
        rows = x.reshape(-1, WIDTH)[:LENGTH].bfloat16()
        return torch._grouped_mm(rows, rows.new_ones(2, WIDTH, 24), offs=ends).float()

    def integers(x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH).to(torch.int8)
        return torch._int_mm(rows, rows.new_ones(WIDTH, 24)).float()

    x = torch.ones(4, LENGTH, WIDTH)
    assert flops_of(Function(grouped), x) == 2 * LENGTH * WIDTH * 24
    assert flops_of(Function(integers), x) == 2 * 2 * LENGTH * WIDTH * 24


@torch.library.custom_op("fpipe_test_flops::twice", mutates_args=())
def foreign(x: Tensor) -> Tensor:
    """An operation of somebody else's."""
    return 2 * x


foreign.register_fake(torch.empty_like)
foreign.register_autograd(lambda ctx, grad: 2 * grad)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda x: torch.linalg.inv(x @ x.mT), "aten.linalg_inv_ex.default"),
        (foreign, "fpipe_test_flops.twice.default"),
    ],
)
def test_operations_without_a_formula_are_warned_about(
    function: Callable[[Tensor], Tensor], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.ones(4, LENGTH, WIDTH)
    flops_of(nn.Softmax(-1), x)
    assert not caplog.records
    flops_of(Function(function), x)
    (record,) = caplog.records
    assert record.name == "fpipe" and record.getMessage() == (
        f"fpipe.balance counts no FLOPs for {named}: measure=True balances times instead"
    )
