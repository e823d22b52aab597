"""The models that the benchmarks run, as plain functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_WIDTH: Final = 64

Block = dict[str, Tensor]


def block(params: Block, x: Tensor, heads: int) -> Tensor:
    """A transformer block. In and out: (rows, length, width)."""
    h = F.layer_norm(x, x.shape[-1:], params["norm1"])
    q, k, v = F.linear(h, params["qkv"]).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
    x = x + F.linear(h, params["out"])
    h = F.layer_norm(x, x.shape[-1:], params["norm2"])
    return x + F.linear(F.gelu(F.linear(h, params["up"])), params["down"])


def blocks(params: Sequence[Block], x: Tensor) -> Tensor:
    """A stack of blocks, with heads of `HEAD_WIDTH`."""
    for one in params:
        x = block(one, x, x.shape[-1] // HEAD_WIDTH)
    return x


def mean_square(y: Tensor, batch: Tensor) -> Tensor:
    """A loss that costs next to nothing beside a block."""
    return y.float().square().mean()


def init_blocks(
    count: int, width: int, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> list[Block]:
    """Fresh parameters of a stack of blocks."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        drawn = torch.randn(rows, columns, generator=generator, device=device)
        return (drawn / math.sqrt(columns)).to(dtype)

    def ones() -> Tensor:
        return torch.ones(width, device=device, dtype=dtype)

    return [
        {
            "norm1": ones(),
            "qkv": matrix(3 * width, width),
            "out": matrix(width, width),
            "norm2": ones(),
            "up": matrix(4 * width, width),
            "down": matrix(width, 4 * width),
        }
        for _ in range(count)
    ]


def trainable(params: Sequence[Block]) -> list[Block]:
    """Copies for autograd."""
    return [{name: leaf.clone().requires_grad_() for name, leaf in own.items()} for own in params]


def gradients(params: Sequence[Block]) -> list[Block]:
    """What autograd has left on them."""
    return [{name: _gradient(leaf) for name, leaf in own.items()} for own in params]


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad
