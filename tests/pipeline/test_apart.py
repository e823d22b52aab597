"""What a caller has around the first call, in which everything is traced, is not traced itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as modules
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fpipe
from fpipe import schedules
from tests.models import Model, assert_same, mlp, plain_pipeline

SCHEDULE = schedules.zb_h1(ranks=2, microbatches=2)
HOOKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "to the CPU": torch.autograd.graph.save_on_cpu,
    "some": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
}


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("hooks", HOOKS)
def test_hooks_on_saved_tensors(hooks: str, cuts: bool) -> None:
    model = mlp(2, 4)
    pipe = whole(model) if cuts else plain_pipeline(model.stages)
    with HOOKS[hooks]():
        pipe.programs(model.params, model.batch)
        found = pipe.step(model.params, model.batch)
        inside = torch._C._autograd._top_saved_tensors_default_hooks(False)
    assert inside is not None, "they are the caller's"
    assert_same(found, pipe.step(model.params, model.batch))


def whole(model: Model) -> fpipe.Pipeline:
    """The same model as one function."""

    def loss(params: Any, batch: Any) -> Tensor:
        (first, last), (own, other) = model.stages, params
        return model.loss(last(other, fpipe.cut(first(own, batch))), batch)

    return fpipe.pipeline(loss, schedule=SCHEDULE, compile=False)


def test_a_step_that_is_checkpointed() -> None:
    model = mlp(2, 4)
    pipe = plain_pipeline(model.stages)
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)

    def weighed(weight: Tensor) -> Tensor:
        loss: Tensor = pipe.step(model.params, model.batch).loss
        return weight * loss

    made = checkpoint(weighed, weight, use_reentrant=False)
    (found,) = torch.autograd.grad(made, weight)
    torch.testing.assert_close(found, pipe.step(model.params, model.batch).loss)


def of_module(module: nn.Module) -> fpipe.ModulePipeline:
    """A pipeline of two layers."""
    return fpipe.from_module(
        module, schedule=SCHEDULE, cuts=["0"], loss=lambda y, _: y.square().mean(), compile=False
    )


def test_the_counter_of_flops() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe, batch = of_module(module), {"input": torch.ones(4, 4)}
    params = dict(module.named_parameters())
    with FlopCounterMode(display=False), pytest.raises(fpipe.StageError, match="counter of FLOPs"):
        pipe.step(params, batch)
    pipe.step(params, batch)
    with FlopCounterMode(display=False) as counter:
        pipe.step(params, batch)
    assert counter.get_total_flops() > 0


@pytest.mark.parametrize(
    ("register", "kind"),
    [
        (modules.register_module_forward_hook, "forward hook"),
        (modules.register_module_forward_pre_hook, "forward pre-hook"),
        (modules.register_module_full_backward_hook, "backward hook"),
        (modules.register_module_full_backward_pre_hook, "backward pre-hook"),
    ],
)
def test_hooks_of_all_modules_are_no_part_of_a_trace(
    register: Callable[..., Any], kind: str
) -> None:
    """One that was there when a module was traced stayed in it."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    params = {name: own.detach() for name, own in module.named_parameters()}
    pipe, batch = of_module(module), {"input": torch.ones(4, 4)}
    handle = register(lambda *_: None)
    try:
        with pytest.raises(fpipe.StageError, match=rf"Sequential is traced while a {kind} of all"):
            pipe.step(params, batch)
    finally:
        handle.remove()
    expected = module(**batch).square().mean().detach()
    torch.testing.assert_close(pipe.step(params, batch).loss, expected)


def test_another_thread_may_use_the_cache_of_parametrizations() -> None:
    """What a trace put back would have left it on for good, with what it held."""
    begun, ended, outside = threading.Event(), threading.Event(), parametrize.cached()

    def stage(w: Tensor, x: Tensor) -> Tensor:
        begun.set()
        assert ended.wait(30)
        return x * w

    schedule = schedules.gpipe(ranks=1, microbatches=1)
    pipe = fpipe.pipeline([stage], lambda y, _: y.sum(), schedule, compile=False)
    with outside:
        thread = threading.Thread(target=lambda: pipe.value([torch.ones(1)], torch.ones(2)))
        thread.start()
        assert begun.wait(30)
    with parametrize.cached():
        ended.set()
        thread.join()
        assert parametrize._cache_enabled == 1
    assert parametrize._cache_enabled == 0
    assert not parametrize._cache


class Halting(nn.Module):
    """Its forward, once told to, waits for what another thread does."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.ended = threading.Event(), threading.Event()
        self.halts = False

    def forward(self, x: Tensor) -> Tensor:
        if self.halts:
            self.begun.set()
            self.ended.wait(0.5)  # the other thread may have to wait for this one
        return x.sin()


def test_another_thread_does_not_see_a_module_that_is_traced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It took the hooks of the trace for new ones, traced again, and kept that plan."""
    halting = Halting()
    module = nn.Sequential(nn.Linear(4, 4), halting)
    params = {name: own.detach() for name, own in module.named_parameters()}
    pipe, batch = of_module(module), {"input": torch.ones(4, 4)}
    expected = pipe.value(params, batch)
    caplog.set_level(logging.INFO, "fpipe")
    halting.halts = True
    thread = threading.Thread(target=lambda: pipe.value(params, {"input": torch.ones(6, 4)}))
    thread.start()
    assert halting.begun.wait(30)
    halting.halts = False
    found = pipe.value(params, batch)
    halting.ended.set()
    thread.join()
    assert found == expected
    assert caplog.text.count("tracing value") == 1, "that of the thread"


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize("warm", [False, True])
def test_the_cache_of_parametrizations(warm: bool) -> None:
    """It kept abstract tensors, which a trace had made."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parametrize.register_parametrization(module[1], "weight", Doubled())
    params, batch = dict(module.named_parameters()), {"input": torch.ones(4, 4)}
    with parametrize.cached():
        if warm:
            module(**batch)
        step = of_module(module).step(params, batch)
        assert not isinstance(module(**batch), FakeTensor)
    expected = module(**batch).square().mean()
    grads = torch.autograd.grad(expected, list(params.values()))
    torch.testing.assert_close(step.loss, expected.detach())
    for name, grad in zip(params, grads, strict=True):
        torch.testing.assert_close(step.grads[name], grad)
