"""A module that draws: a mask that two stages read, dropout, and noise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from fpipe import Step, random
from fpipe.nn import keyed

WIDTH = 6
CUTS = ["layers.0", "layers.1", "layers.2"]


class Layer(nn.Module):
    """A dropout after a product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.drop(self.linear(x)))


class Dropping(nn.Module):
    """Four layers; a mask from the first stage is used again in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.bernoulli(torch.full_like(x, 0.6))
        x = x * mask
        for layer in self.layers:
            x = layer(x)
        return (x + 0.1 * torch.rand(WIDTH, dtype=x.dtype)) * mask


def make_module() -> Dropping:
    """In training, in float64."""
    torch.manual_seed(0)
    return Dropping().double()


def make_batch() -> dict[str, Tensor]:
    """Eight rows, for four microbatches of one size."""
    torch.manual_seed(1)
    return {"x": torch.randn(8, 3, WIDTH, dtype=torch.float64)}


def squares(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the rows."""
    return output.square().mean()


def unpipelined(module: nn.Module, params: Any, batch: Any, key: Tensor) -> Step:
    """Loss and gradients, each of four microbatches with its own key."""

    def whole(own: Any) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for number, x in enumerate(batch["x"].tensor_split(4)):
            with keyed(random.fold_in(key, number)):
                output = functional_call(module, own, (x,))
            total = total + squares(output, batch) * len(x) / len(batch["x"])
        return total

    grads, loss = grad_and_value(whole)(params)
    return Step(loss, grads)
