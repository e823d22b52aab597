"""Attributes of layers: those of a call are those of the module at the call, not of the trace."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.modules.helpers import by_microbatches, detached, module_pipe, steps_traced, total


class Derived(nn.Linear):
    """A layer that is made of torch's, with an attribute of its own."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.slopes: list[Any] = [0.5, (2,)]
        self.cache: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        self.cache = super().forward(input)
        return F.leaky_relu(self.cache, self.slopes[0]) * self.slopes[1][0]


class Resized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Upsample(scale_factor=2, mode="linear", align_corners=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x)
        return y


class Classified(nn.Module):
    """A loss that is a part of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.entropy, self.huber = nn.CrossEntropyLoss(), nn.HuberLoss()

    def forward(self, x: Tensor) -> Tensor:
        labels = torch.arange(x[..., 0].numel()) % 6
        first = self.entropy(x.reshape(-1, 6), labels)
        return first + self.huber(x, torch.zeros_like(x))


class Net(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(6, 6), part

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(self.first(x))
        return y


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return y


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)


CHANGES: dict[str, tuple[Callable[[], nn.Module], str, Any]] = {
    "batch_first": (Attending, "attention.batch_first", False),
    "dropout of attention": (Attending, "attention.dropout", 1.0),
    "norm_first": (encoder, "norm_first", True),
    "activation": (encoder, "activation", F.softplus),
    "eps within": (encoder, "norm1.eps", 0.5),
    "label_smoothing": (Classified, "entropy.label_smoothing", 0.5),
    "ignore_index": (Classified, "entropy.ignore_index", 2),
    "reduction": (Classified, "entropy.reduction", "sum"),
    "delta": (Classified, "huber.delta", 0.1),
    "align_corners": (Resized, "up.align_corners", True),
    "size": (Resized, "up.scale_factor", 3.0),
    "of a derived layer": (Derived, "slopes", [0.5, (3,)]),
}


# Steps and values in turns: a value is traced in half the time.
@pytest.mark.parametrize(
    ("case", "method"), list(zip(CHANGES, itertools.cycle(("step", "value", "value"))))
)
def test_attributes_are_those_of_the_call(
    case: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Attributes that a layer does not print once kept their values of the trace."""
    make, path, value = CHANGES[case]
    torch.manual_seed(0)
    net, x = Net(make()).double(), torch.randn(4, 5, 6, dtype=torch.float64)
    pipe = module_pipe(net, "first")
    owner, name = net.get_submodule(f"part.{path}".rpartition(".")[0]), path.rpartition(".")[2]
    old = getattr(owner, name)

    def check() -> Tensor:
        expected = by_microbatches(net, {"x": x})
        found = getattr(pipe, method)(detached(net), {"x": x})
        if method == "value":
            torch.testing.assert_close(found, expected.loss)
            loss: Tensor = found
        else:
            torch.testing.assert_close((found.loss, dict(found.grads)), tuple(expected))
            loss = found.loss
        return loss

    with caplog.at_level(logging.INFO, logger="fpipe"):
        before = check()
        setattr(owner, name, value)
        assert not torch.equal(check(), before)
        setattr(owner, name, old)
        assert torch.equal(check(), before)
    assert len(steps_traced(caplog, method)) == 2


def test_a_list_counts_by_what_it_contains() -> None:
    net = Net(Derived()).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    pipe = module_pipe(net, "first", loss=lambda y, _: y.sum() / 4)
    for slope in (0.5, 0.25, 1, True):
        net.get_submodule("part").slopes[0] = slope  # type: ignore[operator]
        expected = net(x).sum().detach() / 8
        torch.testing.assert_close(pipe.value(detached(net), {"x": x}), expected)


def test_tensors_that_come_and_go_are_no_change(caplog: pytest.LogCaptureFixture) -> None:
    """The hook of weight_norm makes its layer a new weight at each forward."""
    with pytest.warns(FutureWarning, match="weight_norm"):
        normed = nn.utils.weight_norm(nn.Linear(6, 6))
    net, x = Net(normed).double(), torch.randn(4, 6, dtype=torch.float64)
    pipe = module_pipe(net, "first", loss=lambda y, _: y.sum() / 4)
    with caplog.at_level(logging.INFO, logger="fpipe"):
        for _ in range(3):
            expected = net(x).sum().detach() / 8
            torch.testing.assert_close(pipe.step(detached(net), {"x": x}).loss, expected)
    assert len(steps_traced(caplog)) == 1


def test_attributes_that_change_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    net, x = Net(nn.LeakyReLU()), torch.randn(4, 6)
    pipe = module_pipe(net, "first", loss=total)
    with caplog.at_level(logging.WARNING, "fpipe"):
        for number in range(10):
            net.get_submodule("part").negative_slope = 0.1 * number  # type: ignore[assignment]
            pipe.value(detached(net), {"x": x})
    (record,) = caplog.records
    assert "the attributes of layers of Net have been replaced 8 times" in record.message


class Counted(nn.Module):
    """A parametrization, which may gather its parameter from other processes."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.calls += 1
        return x * 2


class Property(nn.Dropout):
    """A layer whose rate is computed."""

    reads = 0

    @property
    def p(self) -> float:
        Property.reads += 1
        return 0.0

    @p.setter
    def p(self, value: float) -> None:
        pass

    def extra_repr(self) -> str:
        raise AssertionError("is printed")


def test_a_later_step_runs_no_code_of_the_module() -> None:
    """Printing a layer once computed its parametrized bias in each step."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1), Property(), nn.Linear(4, 1))
    parametrize.register_parametrization(net[0], "bias", Counted())
    parametrize.register_parametrization(net[1], "bias", Counted())
    net.double()
    batch = {"input": torch.randn(8, 4, 4, dtype=torch.float64)}
    pipe = module_pipe(net, "1")
    expected = net(batch["input"]).square().mean().detach()
    pipe.step(detached(net), batch)
    Counted.calls = Property.reads = 0
    torch.testing.assert_close(pipe.step(detached(net), batch).loss, expected)
    torch.testing.assert_close(pipe.value(detached(net), batch), expected)
    assert (Counted.calls, Property.reads) == (0, 0)
