"""Modes of the caller's: refused where a pipeline cannot follow them, and no part of a plan."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fpipe
from fpipe import random
from fpipe.nn import keyed
from fpipe.schedules import gpipe

TWO = gpipe(ranks=2, microbatches=2)


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if getattr(func, "__name__", "") == "tanh" else out


class Tripled(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.fake = self.fake or any("Fake" in type(one).__name__ for one in args)
        out = func(*args, **(kwargs or {}))
        return out * 3 if func is torch.ops.aten.tanh.default else out

    fake = False


def stage(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def two_stages(
    function: Callable[[Tensor, Tensor], Tensor] = stage, compile: Any = False
) -> fpipe.Pipeline:
    return fpipe.pipeline([function] * 2, lambda y, _: y.square().mean(), TWO, compile=compile)


@pytest.fixture
def arguments() -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    params = [torch.randn(3, 3, dtype=torch.float64) for _ in range(2)]
    return params, torch.randn(4, 3, dtype=torch.float64)


def plain(params: list[Tensor], batch: Tensor) -> tuple[Tensor, list[Tensor]]:
    leaves = [p.clone().requires_grad_() for p in params]
    loss = stage(leaves[1], stage(leaves[0], batch)).square().mean()
    return loss.detach(), list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("first", [True, False])
def test_a_function_mode_is_refused(first: bool, arguments: Any) -> None:
    """What it had done at the first call was in the plan from then on."""
    pipe = two_stages()
    if not first:
        pipe.step(*arguments)
    calls: list[Callable[[], Any]] = [
        lambda: pipe.step(*arguments),
        lambda: pipe.value(*arguments),
        lambda: pipe.forward(*arguments),
        lambda: pipe.programs(*arguments),
        lambda: fpipe.grad(pipe, ("params", "batch")).step(*arguments),
        lambda: torch.func.grad(lambda x: pipe.value(arguments[0], x))(arguments[1]),
    ]
    for call in calls:
        with Doubled(), pytest.raises(fpipe.FpipeError, match=r"a Doubled, a TorchFunctionMode"):
            call()
    torch.testing.assert_close(tuple(pipe.step(*arguments)), plain(*arguments))


def test_a_function_mode_that_stages_enter(arguments: Any) -> None:
    def doubled(w: Tensor, x: Tensor) -> Tensor:
        with Doubled():
            return stage(w, x)

    with Doubled():
        expected = plain(*arguments)
    torch.testing.assert_close(tuple(two_stages(doubled).step(*arguments)), expected)


def test_a_dispatch_mode_sees_what_runs(arguments: Any) -> None:
    """It took part in the first trace: what it did was in the plan, and was done again."""
    pipe = two_stages()
    for _ in range(2):
        with Tripled() as mode:
            expected = plain(*arguments)
            torch.testing.assert_close(tuple(pipe.step(*arguments)), expected)
        assert not mode.fake
        torch.testing.assert_close(tuple(pipe.step(*arguments)), plain(*arguments))


def test_a_dispatch_mode_over_compiled_stages(arguments: Any) -> None:
    pipe = two_stages(compile=lambda module, _: lambda given: module(*given))
    with Tripled(), pytest.raises(fpipe.FpipeError, match=r"a Tripled, a TorchDispatchMode.*compi"):
        pipe.step(*arguments)
    with FlopCounterMode(display=False):  # which changes no number
        found = pipe.step(*arguments)
    torch.testing.assert_close(tuple(found), plain(*arguments))


@pytest.mark.parametrize("context", [lambda: torch.device("cpu"), lambda: torch.device("meta")])
def test_the_default_device_is_no_mode_to_refuse(
    context: Callable[[], AbstractContextManager[Any]], arguments: Any
) -> None:
    pipe = two_stages()
    with context():
        found = pipe.step(*arguments)
    torch.testing.assert_close(tuple(found), plain(*arguments))


def test_a_pipeline_with_a_key_within_keyed() -> None:
    def noisy(p: Tensor, x: Tensor, key: Tensor) -> Tensor:
        return x * p * random.uniform(key, x.shape, x.dtype)

    pipe = fpipe.pipeline(
        [fpipe.Stage(noisy, reads_key=True)] * 2, lambda y, _: y.mean(), TWO, compile=False
    )
    given = [torch.ones(()), torch.ones(())], torch.ones(4)
    expected = pipe.value(*given, key=random.key(1))

    again = fpipe.pipeline(
        pipe._engine.definition.stages, pipe._engine.definition.loss, TWO, compile=False
    )
    for seed in (2, 3):
        with keyed(random.key(seed)):
            assert torch.equal(again.value(*given, key=random.key(1)), expected)
    assert torch.equal(again.value(*given, key=random.key(1)), expected)
