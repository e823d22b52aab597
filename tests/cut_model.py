"""One loss function with cuts: a mask that all blocks read, a long skip, a table at both ends."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe

VOCABULARY, WIDTH, LENGTH = 11, 8, 5
IN_DIMS = {"tokens": 0, "targets": 0, "visible": None}


def block(params: dict[str, Tensor], x: Tensor, mask: Tensor) -> Tensor:
    """Attention through a mask."""
    h = F.layer_norm(x, (WIDTH,), params["scale"])
    q, k, v = (h @ params["qkv"]).chunk(3, -1)
    return x + torch.tanh((q @ k.transpose(-1, -2) + mask).softmax(-1) @ v)


def language_model(params: dict[str, Any], batch: dict[str, Tensor]) -> Tensor:
    """Four stages, between the blocks."""
    mask = torch.zeros(LENGTH, LENGTH).masked_fill(~batch["visible"], -1e9)
    embedded = F.embedding(batch["tokens"], params["table"])
    x = embedded
    for number, own in enumerate(params["blocks"]):
        x = block(own, x, mask)
        if number < 3:
            x = fpipe.cut(x)
    logits = (x + 0.5 * embedded) @ params["table"].T
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def make_params() -> dict[str, Any]:
    """Parameters, with one that is not used and one that is no number to train."""
    torch.manual_seed(0)
    double = torch.float64
    return {
        "table": torch.randn(VOCABULARY, WIDTH, dtype=double),
        "unused": torch.randn(3, dtype=double),
        "count": torch.tensor(3),
        "blocks": [
            {
                "scale": torch.rand(WIDTH, dtype=double),
                "qkv": torch.randn(WIDTH, 3 * WIDTH, dtype=double) / 3,
            }
            for _ in range(4)
        ],
    }


def make_batch(rows: int = 8) -> dict[str, Tensor]:
    """Rows that four microbatches divide: with nine, stages are traced for two sizes."""
    torch.manual_seed(1)
    return {
        "tokens": torch.randint(VOCABULARY, (rows, LENGTH)),
        "targets": torch.randint(VOCABULARY, (rows, LENGTH)),
        "visible": torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)),
    }


def network(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Four small stages: two read the inputs, two share each matrix, and the first has a skip."""
    first = fpipe.cut(torch.tanh(batch["x"] @ params["a"]))
    h = fpipe.cut(torch.tanh(first @ params["b"]) + batch["x"])
    h = fpipe.cut(h * params["b"].sum(0))
    return ((h + first) @ params["a"] - batch["y"]).square().mean()


def make_network(dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and a batch of six rows."""
    torch.manual_seed(2)
    params = {name: torch.randn(3, 3, dtype=dtype) for name in "ab"}
    return params, {name: torch.randn(6, 3, dtype=dtype) for name in "xy"}
