"""A small GPT, cut into stages where anyone would cut it: between blocks, as many in each stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contest import CPU, Problem
from benchmarks.models import blocks, init_blocks


class Size(NamedTuple):
    """The model and its batch."""

    layers: int = 8
    width: int = 256
    length: int = 128
    vocabulary: int = 1024
    rows: int = 16  # in a batch
    microbatches: int = 8


def first(params: Any, tokens: Tensor) -> Tensor:
    """Embed the tokens, then the first blocks."""
    return blocks(params["blocks"], F.embedding(tokens, params["tokens"]) + params["places"])


def middle(params: Any, x: Tensor) -> Tensor:
    """Blocks alone."""
    return blocks(params["blocks"], x)


def last(params: Any, x: Tensor) -> Tensor:
    """The last blocks, then a logit for each token of the vocabulary."""
    x = blocks(params["blocks"], x)
    return F.linear(F.layer_norm(x, x.shape[-1:], params["norm"]), params["head"])


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_problem(size: Size, num_stages: int) -> Problem:
    """The same model and batch for any number of stages that divides the layers."""
    generator = torch.Generator().manual_seed(0)
    all_blocks = init_blocks(size.layers, size.width, CPU, torch.float32)
    each = size.layers // num_stages
    params: list[dict[str, Any]] = [
        {"blocks": all_blocks[stage * each : (stage + 1) * each]} for stage in range(num_stages)
    ]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(size.width)

    params[0] |= {
        "tokens": draw(size.vocabulary, size.width),
        "places": draw(size.length, size.width),
    }
    params[-1] |= {
        "norm": torch.ones(size.width),
        "head": draw(size.vocabulary, size.width),
    }
    shape = (size.rows, size.length)
    inputs, targets = (torch.randint(size.vocabulary, shape, generator=generator) for _ in range(2))
    functions: Sequence[Callable[[Any, Any], Tensor]] = [
        first,
        *[middle] * (num_stages - 2),
        last,
    ]
    return Problem(functions, params, loss, inputs, targets)
