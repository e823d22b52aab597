"""A module with every kind of buffer, and what a checkpoint has of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

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


def make_module() -> Normed:
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


def make_batch() -> dict[str, Tensor]:
    """Eight rows."""
    torch.manual_seed(1)
    return {"x": torch.randn(8, 3).double() + 1}


def squares(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the rows."""
    return output.square().mean()


def write_file(module: nn.Module, folder: Path) -> Path:
    """The state dict in one file."""
    save_file(module.state_dict(), folder / "model.safetensors")
    return folder / "model.safetensors"


def write_distributed(module: nn.Module, folder: Path) -> Path:
    """The state dict in a directory of torch.distributed.checkpoint."""
    with pytest.warns(UserWarning, match="to save in a single process"):
        dcp.save(module.state_dict(), checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


WRITERS: list[Callable[[nn.Module, Path], Path]] = [write_file, write_distributed]
