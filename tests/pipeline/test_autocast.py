"""Autocast around a call, and backwards as those of a loop in torch are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fpipe
from fpipe import schedules
from tests.models import boxed

SCHEDULE = schedules.zb_h1(ranks=2, microbatches=1)
X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


def routed(p: Any, x: Tensor) -> Tensor:
    """Half precision but for what decides."""
    h = x @ p["a"]
    with torch.autocast("cpu", enabled=False):
        return torch.tanh(h.float() @ p["b"])


def decided(p: Any, h: Tensor) -> Tensor:
    """Single precision."""
    with torch.autocast("cpu", enabled=False):
        return h.float() @ p["c"]


def square(y: Tensor, _: Any) -> Tensor:
    """The loss."""
    return y.square().mean()


def in_order(p: Any, x: Tensor) -> Tensor:
    """The same as one function."""
    return square(decided(p[1], fpipe.cut(routed(p[0], x))), x)


def parameters() -> list[dict[str, Tensor]]:
    """Leaves that require a gradient."""
    generator = torch.Generator().manual_seed(1)

    def fresh() -> Tensor:
        return (torch.randn(32, 32, generator=generator) / 6).requires_grad_()

    return [{"a": fresh(), "b": fresh()}, {"c": fresh()}]


@pytest.mark.parametrize("cuts", [False, True])
def test_regions_without_it_stay_without(cuts: bool) -> None:
    """As in a loop of torch, whose backward is outside."""
    params = parameters()
    with torch.autocast("cpu", torch.bfloat16):
        loss = in_order(params, X)
    loss.backward()
    pipe = (
        fpipe.pipeline(in_order, schedule=SCHEDULE, compile=False)
        if cuts
        else fpipe.pipeline([routed, decided], square, SCHEDULE, compile=False)
    )
    with torch.autocast("cpu", torch.bfloat16):
        step = pipe.step(params, X)
    assert step.loss.dtype == torch.float32
    assert step.loss.equal(loss)
    for own, stage in zip(step.grads, params, strict=True):
        for name, leaf in stage.items():
            assert leaf.grad is not None
            assert own[name].equal(leaf.grad), name


class Router(nn.Module):
    """As models with experts have one."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.router = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        with torch.autocast("cpu", enabled=False):
            return self.router(x.float())


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.inductor)])
def test_of_a_module_too(compile: bool) -> None:
    module = Router()
    pipe = fpipe.from_module(
        module,
        schedule=SCHEDULE,
        cuts=["before"],
        loss=lambda y, _: (y.square().mean(), y),
        has_aux=True,
        compile=compile,
    )
    params = {name: parameter.detach() for name, parameter in module.named_parameters()}
    with torch.autocast("cpu", torch.bfloat16):
        found = (pipe.forward if compile else pipe.step)(params, {"x": X}).aux  # has fewer kernels
        expected = module(X)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=0 if not compile else 4e-3)


@pytest.mark.inductor
def test_what_it_compiled_under_autocast_is_right_without() -> None:
    """The same graph is compiled once."""
    pipe = fpipe.pipeline([decided], square, schedules.gpipe(ranks=1, microbatches=1))
    params = parameters()[1:]
    with torch.autocast("cpu", torch.bfloat16):
        step = pipe.step(params, X)
    torch.testing.assert_close(step.loss, square(decided(params[0], X), X).detach())


ALWAYS_LONG = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch 2.11 takes the longer one for any abstract tensor"
)


@pytest.mark.parametrize(
    "function",
    [
        F.silu,
        F.mish,
        lambda x: F.group_norm(x, 4),
        pytest.param(lambda x: x.cumprod(-1), marks=ALWAYS_LONG),
        F.logsigmoid,
    ],
)
def test_a_backward_rounds_as_that_of_torch(function: Callable[[Tensor], Tensor]) -> None:
    """Torch has other formulas, with more steps, for a backward that is differentiated again."""
    leaf = X.bfloat16().requires_grad_()
    square(function(leaf).float() * torch.arange(32), None).backward()
    pipe = fpipe.pipeline(
        [lambda p, _: function(p).float() * torch.arange(32)],
        square,
        schedules.gpipe(ranks=1, microbatches=1),
        compile=False,
    )
    (grad,) = pipe.step([leaf], X).grads
    assert leaf.grad is not None
    assert grad.equal(leaf.grad)


@ALWAYS_LONG
def test_a_backward_is_no_longer_than_that_of_torch() -> None:
    counts: list[int] = []

    def counted(graph: fx.GraphModule, _: Any) -> Any:
        counts.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return boxed(graph)

    pipe = fpipe.pipeline(
        [lambda p, _: p.cumprod(-1)],
        square,
        schedules.gpipe(ranks=1, microbatches=1),
        compile=counted,
    )
    pipe.step([X], X)
    assert sum(counts) < 100, "that of a second derivative has some for each element of a row"
