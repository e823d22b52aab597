"""What a forward or a hook keeps on a module while it is traced with a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe.nn import state_of


class Net(nn.Module):
    """Its norm has a state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


class Keeps(Net):
    """Keeps a value of its forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.first(x)
        return self.last(self.norm(self.features))


class KeepsInAList(Net):
    """Keeps views of its values, in a list."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.seen = [h[:, :2], {"norm": self.norm.running_mean}]
        return self.last(self.norm(h))


def with_hook() -> Net:
    """A hook keeps what a layer returns on that layer."""
    net = Net()
    net.first.register_forward_hook(lambda layer, _, output: setattr(layer, "output", output))
    return net


@pytest.mark.parametrize("make", [Keeps, KeepsInAList, with_hook])
def test_it_computes_as_without(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    net = make().double()
    net.load_state_dict(plain.state_dict())
    batch = {"x": torch.randn(8, 4, dtype=torch.float64)}
    steps = []
    for module in (plain, net):
        pipe = fpipe.from_module(
            module,
            schedule=fpipe.schedules.zb_h1(ranks=2, microbatches=2),
            cuts=["norm"],
            loss=lambda output, _: output.square().mean(),
            has_state=True,
            compile=False,
        )
        params = {name: leaf.detach() for name, leaf in module.named_parameters()}
        steps.append(pipe.step(params, state_of(module), batch))
    torch.testing.assert_close(tuple(steps[1]), tuple(steps[0]))
