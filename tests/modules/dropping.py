"""A module that draws: a mask that two stages read, dropout, and noise."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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


def dropping_module() -> Dropping:
    """In training, in float64."""
    torch.manual_seed(0)
    return Dropping().double()


def dropping_batch() -> dict[str, Tensor]:
    """Eight rows, for four microbatches of one size."""
    torch.manual_seed(1)
    return {"x": torch.randn(8, 3, WIDTH, dtype=torch.float64)}
