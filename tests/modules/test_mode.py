"""A step follows the module as it is at the call: its mode, submodules, buffers and hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from tests.modules.helpers import (
    assert_equal_steps,
    by_microbatches,
    detached,
    linears,
    module_pipe,
    steps_traced,
    total,
)


class Louder(nn.Module):
    """Three times as loud in training."""

    def forward(self, input: Tensor) -> Tensor:
        return input * (3.0 if self.training else 1.0)


def test_the_mode_of_the_module_is_that_of_the_call(caplog: pytest.LogCaptureFixture) -> None:
    """Each set of shapes once kept the mode of its first call.

    A batch of another size, first met in evaluation, was trained without dropout from then on.
    """
    module = nn.Sequential(nn.Linear(2, 2), Louder()).double()
    params, batch = detached(module), {"input": torch.ones(4, 2, dtype=torch.float64)}
    pipe = module_pipe(module, "0", loss=total)
    ensemble = fpipe.vmap(pipe)
    both = {name: torch.stack([value, value]) for name, value in params.items()}
    with caplog.at_level(logging.INFO, logger="fpipe"):
        for change in (module.train, module.eval, module[1].train, module.eval):
            change()
            expected = module(**batch).sum().detach() / 2  # the mean of two sums
            torch.testing.assert_close(pipe.step(params, batch).loss, expected)
            torch.testing.assert_close(pipe.value(params, batch), expected)
            torch.testing.assert_close(ensemble.step(both, batch).loss, expected.expand(2))
    steps = steps_traced(caplog)
    assert len(steps) == 2 * 3  # all in training, all in evaluation, some in training
    assert steps[-1].endswith(
        "the module has another mode (train, eval), other parts, attributes of layers, buffers or "
        "hooks"
    )


class Scaled(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def test_submodules_are_those_of_the_call(caplog: pytest.LogCaptureFixture) -> None:
    """A submodule without parameters that replaced another once had no effect."""
    tanh, leaky = nn.Tanh(), nn.LeakyReLU(0.1)
    inner = nn.Sequential(nn.Linear(2, 2), leaky)
    module = nn.Sequential(nn.Linear(2, 2), tanh, inner, tanh).double()
    params, batch = detached(module), {"input": torch.ones(4, 2, dtype=torch.float64)}
    pipe = module_pipe(module, "0", loss=total)

    def slope(value: float) -> None:
        leaky.negative_slope = value

    changes: list[tuple[Callable[[], object], bool]] = [
        (lambda: None, True),
        (lambda: module.__setitem__(1, nn.Sigmoid()), True),
        (lambda: module.__setitem__(1, nn.Tanh()), True),  # not shared any more
        (lambda: module.__setitem__(1, nn.Tanh()), False),
        (lambda: module.__setitem__(3, leaky), True),  # another that is there already
        (lambda: slope(-3.0), True),
        (lambda: slope(0.1), False),
        (lambda: module.__setitem__(1, Scaled(2.0)), True),
        (lambda: module.__setitem__(1, Scaled(3.0)), True),
        (lambda: setattr(module[1], "forward", torch.exp), True),
    ]
    with caplog.at_level(logging.INFO, logger="fpipe"):
        for change, is_new in changes:
            change()
            caplog.clear()
            expected = module(**batch).sum().detach() / 2
            torch.testing.assert_close(pipe.step(params, batch).loss, expected)
            assert len(steps_traced(caplog)) == is_new


class Renewing(nn.Module):
    """Makes a part of itself anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(2, 2), nn.Tanh()

    def forward(self, input: Tensor) -> Tensor:
        self.act = nn.Tanh()
        return self.act(self.linear(input))


def test_submodules_that_a_forward_replaces_are_no_change(caplog: pytest.LogCaptureFixture) -> None:
    module = Renewing().double()
    batch = {"input": torch.ones(4, 2, dtype=torch.float64)}
    pipe = module_pipe(module, "linear", loss=total)
    with caplog.at_level(logging.INFO, logger="fpipe"):
        for _ in range(3):
            module(**batch)
            pipe.step(detached(module), batch)
    assert len(steps_traced(caplog)) == 1


class Scaling(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x) * self.scale


def test_buffers_and_dropout_are_those_of_the_call() -> None:
    """Buffers that were replaced, as load_state_dict(assign=True) does, once had no effect."""
    module = nn.Sequential(nn.Linear(2, 2), Scaling()).double()
    linear, scaling = module
    assert isinstance(scaling, Scaling) and isinstance(scaling.dropout, nn.Dropout)
    params, batch = detached(module), {"input": torch.ones(4, 2, dtype=torch.float64)}
    pipe = module_pipe(module, "0", loss=total)

    def check(factor: float) -> None:
        expected = factor * linear(batch["input"]).sum().detach() / 2
        torch.testing.assert_close(pipe.step(params, batch).loss, expected)

    check(1)
    scaling.scale.fill_(2)
    check(2)
    module.load_state_dict(
        module.state_dict() | {"1.scale": torch.tensor(3.0, dtype=torch.float64)}, assign=True
    )
    check(3)
    scaling.dropout.p = 1.0
    check(0)
    scaling.dropout.p = 0.0
    check(3)


def test_buffers_that_are_replaced_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.Linear(2, 2), Scaling()).double()
    scaling = module[1]
    assert isinstance(scaling, Scaling)
    params, batch = detached(module), {"input": torch.ones(4, 2, dtype=torch.float64)}
    pipe = module_pipe(module, "0", loss=total)
    with caplog.at_level(logging.WARNING, "fpipe"):
        for _ in range(10):
            pipe.value(params, batch)
            scaling.scale = scaling.scale * 2
    (record,) = caplog.records
    assert "the buffers of Sequential have been replaced 8 times" in record.message
    with caplog.at_level(logging.WARNING, "fpipe"):
        for _ in range(10):
            handle = module[0].register_forward_hook(lambda *_: None)
            pipe.value(params, batch)
            handle.remove()
    assert "the hooks of Sequential have been replaced 8 times" in caplog.records[-1].message
    assert len(caplog.records) == 2


def test_equal_buffers_are_written_to_apart() -> None:
    """A trace once merged buffers of one number that were equal."""
    module = nn.Sequential(Scaling(), Scaling()).double()
    batch = {"input": torch.ones(4, 2, dtype=torch.float64)}
    pipe = module_pipe(module, "0", loss=lambda y, _: y.mean())
    for index, factor in ((0, 2.0), (1, 6.0)):
        scaling = module[index]
        assert isinstance(scaling, Scaling)
        scaling.scale.fill_(factor / (1 + index))
        assert pipe.value({}, batch) == factor


def test_hooks_are_those_of_the_call(caplog: pytest.LogCaptureFixture) -> None:
    """Hooks registered after the trace once did not run, and removed ones did."""
    module = nn.Sequential(nn.Linear(2, 2), Louder()).double()
    params, batch = detached(module), {"input": torch.ones(4, 2, dtype=torch.float64)}
    pipe = module_pipe(module, "0", loss=total)

    def double(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output * 2

    def check() -> None:
        expected = module(**batch).sum().detach() / 2
        torch.testing.assert_close(pipe.step(params, batch).loss, expected)

    with caplog.at_level(logging.INFO, logger="fpipe"):
        check()
        for _ in range(2):
            handle = module[1].register_forward_hook(double)
            check()
            handle.remove()
            check()
            handle = module[1].register_forward_pre_hook(lambda _, x: (x[0] + 1,))
            check()
            handle.remove()
    steps = steps_traced(caplog)
    assert len(steps) == 1 + 1 + 2  # a function that is put on again is known, a new one is not


def test_backward_hooks_of_modules_count_at_each_call() -> None:
    module = linears().double()

    def mean(output: Tensor, batch: Any) -> Tensor:
        return output.mean()

    def doubled(grads: Any) -> Any:
        return (grads[0] * 2,)

    pipe = module_pipe(module, "0", loss=mean)
    batch = {"input": torch.ones(2, 3).double()}
    expected = pipe.step(detached(module), batch)
    for register in (
        lambda: module[1].register_full_backward_pre_hook(lambda _, grads: doubled(grads)),
        lambda: module[1].register_full_backward_hook(lambda _, grads, __: doubled(grads)),
    ):
        handle = register()
        step = pipe.step(detached(module), batch)
        assert_equal_steps(step, by_microbatches(module, batch, loss=mean))
        handle.remove()
    assert_equal_steps(pipe.step(detached(module), batch), expected)


def test_hooks_on_gradients_that_come_later_are_refused() -> None:
    module = linears()
    pipe = module_pipe(module, "0", loss=lambda output, _: output.mean())
    batch = {"input": torch.ones(2, 3)}
    expected = pipe.step(detached(module), batch)
    weight = module.get_parameter("1.weight")
    for register, where in (
        (lambda: weight.register_hook(lambda g: g * 0), r"parameter\('1.weight'\)"),
        (lambda: weight.register_post_accumulate_grad_hook(lambda _: None), "parameter"),
    ):
        handle = register()
        with pytest.raises(fpipe.StageError, match=rf"{where}.* hooks on its gradient.*remove"):
            pipe.step(detached(module), batch)
        handle.remove()
    assert_equal_steps(pipe.step(detached(module), batch), expected)
