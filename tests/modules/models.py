"""A module written as people write them: tied ends, a buffer, a long skip, blocks in a list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH = 11, 8, 5
CUTS = ["blocks.0", "blocks.1", "blocks.2"]


class Block(nn.Module):
    """Attention through the model's mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """A tuple, as blocks that also return their attention do."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2) + mask).softmax(-1)
        return x + torch.tanh(weights @ v), weights


class LanguageModel(nn.Module):
    """Blocks; the head is the embedding's table."""

    mask: Tensor

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -1e9).triu(1))

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        """Logits, and the loss where there are labels."""
        embedded = x = self.embedding(tokens)
        for block in self.blocks:
            x, _ = block(x, self.mask)
        logits = self.head(x + 0.5 * embedded)
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": token_loss({"logits": logits}, {"labels": labels})}


def token_loss(output: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(output["logits"].flatten(0, 1), batch["labels"].flatten())


def language_model() -> LanguageModel:
    """In float64, the same each time."""
    torch.manual_seed(0)
    return LanguageModel().double()


def token_batch(rows: int = 8) -> dict[str, Tensor]:
    """Rows that four microbatches divide: with nine, stages are traced for two sizes."""
    torch.manual_seed(1)
    return {
        "tokens": torch.randint(VOCABULARY, (rows, LENGTH)),
        "labels": torch.randint(VOCABULARY, (rows, LENGTH)),
    }
