"""A module that holds its pipeline is copied with it: that of the copy is of the copy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from tests.modules.helpers import (
    assert_equal_steps,
    by_microbatches,
    detached,
    module_pipe,
    squares,
)


class Net(nn.Module):
    """Keeps a pipeline of itself, as a model with a method of its own for training does."""

    scale: Tensor
    pipe: fpipe.ModulePipeline

    def __init__(self, loss: Any = squares) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)
        self.register_buffer("scale", torch.full((), 2.0), persistent=False)
        self.double()
        self.pipe = module_pipe(self, "first", loss=loss)

    def _init_weights(self, part: nn.Module) -> None:
        if isinstance(part, Net):
            part.scale.fill_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.drop(torch.tanh(self.first(x)))) * self.scale
        return output


X = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)


def loss_of(net: Net) -> Tensor:
    """The loss of a step, which must be that of the module itself."""
    expected = by_microbatches(net, {"x": X})
    step = net.pipe.step(detached(net), {"x": X})
    assert_equal_steps(step, expected)
    return step.loss


@pytest.mark.parametrize("warm", [False, True])
def test_the_pipeline_of_a_copy_is_of_the_copy(warm: bool) -> None:
    """The copy was refused, for pipelines are no values."""
    net = Net().eval()
    if warm:
        loss_of(net)
    other = copy.deepcopy(net)
    assert other.pipe is not net.pipe and other.pipe.module is other and net.pipe.module is net
    before = loss_of(net)
    assert torch.equal(loss_of(other), before)
    other.scale = torch.tensor(3.0, dtype=torch.float64)
    assert not torch.equal(loss_of(other), before) and torch.equal(loss_of(net), before)
    with torch.no_grad():
        other.first.weight.mul_(2)
    net.pipe.load_into(other, detached(net))
    assert torch.equal(loss_of(net), before)
    loss_of(copy.deepcopy(other))


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Net().eval()
        self.pipes = [self.inner.pipe]


def test_a_module_around_that_module_is_copied_with_the_pipeline() -> None:
    held = Held()
    other = copy.deepcopy(held)
    assert other.pipes[0] is other.inner.pipe and other.inner.pipe.module is other.inner
    loss_of(other.inner)


class Huber(nn.Module):
    """A loss that is a module, whose mode and parts count too."""

    def __init__(self) -> None:
        super().__init__()
        self.huber = nn.HuberLoss(delta=0.1)

    def forward(self, y: Tensor, batch: Any) -> Tensor:
        loss: Tensor = self.huber(y, torch.zeros_like(y))
        return loss


def test_a_loss_that_is_a_module_is_copied_with_it() -> None:
    loss = Huber()
    net = Net(loss).eval()
    other = copy.deepcopy(net)
    loss.huber.delta = 10.0
    expected = [nn.HuberLoss(delta=d)(model(X), torch.zeros(4, 2)) for d, model in
                ((10.0, net), (0.1, other))]  # fmt: skip
    losses = [model.pipe.value(detached(model), {"x": X}) for model in (net, other)]
    torch.testing.assert_close(losses, [value.detach() for value in expected], check_dtype=False)


def test_a_pipeline_of_a_module_is_no_value_by_itself() -> None:
    net = Net()
    with pytest.raises(fpipe.FpipeError, match="cannot be copied or pickled"):
        copy.deepcopy(net.pipe)
    net.pipe = fpipe.vmap(net.pipe)  # whose functions are of this module
    with pytest.raises(fpipe.FpipeError, match="cannot be copied or pickled"):
        copy.deepcopy(net)


def test_buffers_of_a_module_that_holds_its_pipeline_are_made_anew() -> None:
    """The module initializes them in a copy of itself, which holds no pipeline."""
    with torch.device("meta"):
        net = Net()
    params = {name: torch.ones(p.shape, dtype=p.dtype) for name, p in net.named_parameters()}
    loss = module_pipe(net.eval(), "first").value(params, {"x": X})  # it holds the first
    plain = (torch.tanh(X.sum(1) + 1) * 4 + 1) * 2
    torch.testing.assert_close(loss, plain.square().mean())
