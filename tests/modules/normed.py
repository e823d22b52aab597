"""A module with every kind of buffer, and what a checkpoint has of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.modules.helpers import write_distributed

CUTS = ["first", "norm", "second"]


class Normed(nn.Module):
    """Statistics, a scale that a checkpoint has, a table and a count that it has not."""

    scale: Tensor
    table: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def reset_parameters(self) -> None:
        """The buffers as they are at first."""
        self.scale.fill_(1)
        self.table.copy_(torch.arange(4.0))
        self.calls.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        x = self.norm(self.first(x)) * self.scale
        return self.last(torch.tanh(self.second(x) + self.table))


def normed_module() -> Normed:
    """In float64, trained for a while."""
    torch.manual_seed(0)
    module = Normed().double()
    module.scale.fill_(1.5)
    for _ in range(3):
        module(torch.randn(6, 3).double() + 1)
    module.calls.zero_()
    return module


def without_data() -> Normed:
    """Its shapes."""
    with torch.device("meta"):
        return Normed().double()


def normed_batch() -> dict[str, Tensor]:
    """Eight rows."""
    torch.manual_seed(1)
    return {"x": torch.randn(8, 3).double() + 1}


def write_file(module: nn.Module, folder: Path) -> Path:
    """The state dict in one file."""
    save_file(module.state_dict(), folder / "model.safetensors")
    return folder / "model.safetensors"


WRITERS: list[Callable[[nn.Module, Path], Path]] = [write_file, write_distributed]
