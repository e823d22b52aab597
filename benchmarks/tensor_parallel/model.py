"""A GPT in stages, whose layers `parallelize_module` divides; plain tensors go between stages."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

VOCABULARY = 256


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # The gradient of a bias of the keys would be 0 but for rounding.
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.size = width // heads

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            f(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Stage(nn.Module):
    """Some blocks; the first stage embeds, and the last one has the logits."""

    def __init__(self, width: int, heads: int, blocks: int, first: bool, last: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width) if first else None
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width) if last else None
        self.head = nn.Linear(width, VOCABULARY, bias=False) if last else None

    def forward(self, x: Any) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        out: Tensor = x
        return out


def make_stages(count: int, width: int, heads: int, blocks: int) -> list[Stage]:
    """The same stages on every process."""
    torch.manual_seed(0)
    each = blocks // count
    return [Stage(width, heads, each, i == 0, i == count - 1) for i in range(count)]


def divide(stage: Stage, mesh: DeviceMesh) -> None:
    """Heads, hidden units, columns of the head and rows of the embedding."""
    plan: dict[str, ParallelStyle] = {}
    if stage.embed is not None:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate())
    if stage.head is not None:
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    for i in range(len(stage.blocks)):
        block = f"blocks.{i}."
        plan |= {block + name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        plan |= {block + name: RowwiseParallel() for name in ("o", "down")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mesh is part of another
        parallelize_module(stage, mesh, plan)


def surprise(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
