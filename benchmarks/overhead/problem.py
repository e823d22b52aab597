"""Stages of next to nothing, the same for everyone."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contest import Problem

WIDTH: Final = 8
ROWS: Final = 8  # in a microbatch
REPEATS: Final = 10  # steps in a row, as in training


def product(weight: Tensor, x: Tensor) -> Tensor:
    """Every stage."""
    return x @ weight


def make_problem(num_stages: int, microbatches: int) -> Problem:
    """Stages of one small product each."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return Problem(
        functions=[product] * num_stages,
        params=[draw(WIDTH, WIDTH) / 3 for _ in range(num_stages)],
        loss=F.mse_loss,
        inputs=draw(microbatches * ROWS, WIDTH),
        targets=draw(microbatches * ROWS, WIDTH),
    )
