"""Ctrl-C while a pipeline is traced leaves neither it nor torch in the midst of something."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fpipe
from fpipe.trace.functional import Checked
from fpipe.trace.isolation import held_back

SCHEDULE = fpipe.schedules.gpipe(ranks=2, microbatches=2)
PARAMS = [torch.eye(3), torch.eye(3)]
BATCH = torch.ones(4, 3)


def stage(p: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ p).clone().add_(1)


def pipeline() -> Any:
    return fpipe.pipeline([stage, stage], lambda y, _: y.square().mean(), SCHEDULE, compile=False)


@pytest.fixture(autouse=True)
def usual_handler() -> Iterator[None]:
    """Whatever starts the tests may ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Pressed:
    """Sends the signal the n-th time that an abstract operation enters its mode."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, number: int, signalled: int = signal.SIGINT
    ) -> None:
        self.left = number
        enter = FakeTensorMode.__enter__

        def entered(mode: FakeTensorMode) -> Any:
            made = enter(mode)
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signalled)
            return made

        monkeypatch.setattr(FakeTensorMode, "__enter__", entered)


@pytest.mark.parametrize("number", [1, 2, 3, 5, 7, 9])
def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    pipe = pipeline()
    expected = pipeline().step(PARAMS, BATCH)
    with monkeypatch.context() as patch:
        pressed = Pressed(patch, number)
        with pytest.raises(KeyboardInterrupt):
            pipe.step(PARAMS, BATCH)
        assert pressed.left <= 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not isinstance(torch.ones(1), FakeTensor)
    torch.testing.assert_close(pipe.step(PARAMS, BATCH), expected)


def module_pipeline() -> Any:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
    loss = by_square
    return fpipe.from_module(module, schedule=SCHEDULE, cuts=["1"], loss=loss, compile=False)


def by_square(y: Tensor, _: Any) -> Tensor:
    return y.square().mean()


def cut_pipeline() -> Any:
    def whole(params: Any, x: Tensor) -> Tensor:
        return by_square(stage(params[1], fpipe.cut(stage(params[0], x))), x)

    return fpipe.pipeline(whole, schedule=SCHEDULE, compile=False)


@pytest.mark.parametrize("make", [pipeline, module_pipeline, cut_pipeline])
def test_at_whichever_operation(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where C++ asks for something, and could not be left by an exception."""
    torch.manual_seed(0)
    shapes = {"0.weight": (3, 3), "0.bias": (3,), "2.weight": (3, 3), "2.bias": (3,)}
    named = {name: torch.randn(shape) for name, shape in shapes.items()}
    arguments = (named, {"input": BATCH}) if make is module_pipeline else (PARAMS, BATCH)
    count, at = 0, 0
    plain = Checked.__torch_dispatch__

    def pressed(*given: Any) -> Any:
        nonlocal count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(*given)

    monkeypatch.setattr(Checked, "__torch_dispatch__", pressed)
    expected = make().step(*arguments)
    assert count > 20, count
    for at in range(1, count + 1, 5):  # it is read in `pressed`
        pipe, count = make(), 0
        with pytest.raises(KeyboardInterrupt):
            pipe.step(*arguments)
        at = 0
        torch.testing.assert_close(pipe.step(*arguments), expected)


def test_what_an_insistent_one_leaves_behind() -> None:
    """A second signal comes wherever it comes, such as in the midst of an operation."""
    pipe = pipeline()
    expected = pipe.step(PARAMS, BATCH)
    modes = [one for one in gc.get_objects() if type(one) is FakeTensorMode]
    for mode in modes:
        mode.in_kernel_invocation = True
    longer = torch.cat([BATCH, BATCH])
    torch.testing.assert_close(pipe.step(PARAMS, longer).loss, expected.loss)


def test_a_handler_that_raises_nothing_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: calls.append((number, frame)))
    Pressed(monkeypatch, 3)
    pipeline().step(PARAMS, BATCH)
    assert len(calls) == 1 and calls[0][0] == signal.SIGINT and calls[0][1] is not None


def test_what_a_handler_raises_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        pass

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stop

    signal.signal(signal.SIGINT, stop)
    Pressed(monkeypatch, 3)
    with pytest.raises(Stop):
        pipeline().step(PARAMS, BATCH)
    assert signal.getsignal(signal.SIGINT) is stop


def test_whoever_insists_is_heard() -> None:
    """In a stage that begins no operation for long."""
    reached = []
    with pytest.raises(KeyboardInterrupt), held_back():
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("after one")
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("after two")
    assert reached == ["after one"]
    with pytest.raises(KeyboardInterrupt), held_back(), held_back():
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("within two")
    assert reached[1:] == ["within two"]


def test_other_signals_are_held_back_too() -> None:
    """Each is called, once, though another one raises; and their handlers are there again."""
    calls: list[int] = []

    class Stop(Exception):
        pass

    def note(number: int, frame: FrameType | None) -> None:
        calls.append(number)
        raise Stop

    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        with pytest.raises(Stop), held_back(), held_back():
            for number in (*numbers, signal.SIGUSR1):
                os.kill(os.getpid(), number)
            assert not calls
        assert sorted(calls) == sorted(numbers)
        assert all(signal.getsignal(number) is note for number in numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGALRM])
def test_what_another_signal_raises_comes_out(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """It was raised in the midst of an operation, and lost or told as what a stage does."""

    class Stop(Exception):
        pass

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stop

    pipe, expected = pipeline(), pipeline().step(PARAMS, BATCH)
    before = signal.signal(number, stop)
    try:
        with monkeypatch.context() as patch:
            Pressed(patch, 5, number)
            with pytest.raises(Stop):
                pipe.step(PARAMS, BATCH)
        assert not isinstance(torch.ones(1), FakeTensor)
        torch.testing.assert_close(pipe.step(PARAMS, BATCH), expected)
    finally:
        signal.signal(number, before)


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_back():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGINT)
