"""A GPT in stages, whose layers `parallelize_module` divides; plain tensors go between stages.

Beside it, what benchmarks over rows of a mesh share: the stages as pure functions, a batch, and the
comparison of gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
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


def stage_function(stage: Stage) -> Callable[[Any, Any], Tensor]:
    """A stage as a pure function of its parameters; the first one reads the inputs of a batch."""

    def call(params: Any, x: Any) -> Tensor:
        x = x["inputs"] if isinstance(x, dict) else x
        y: Tensor = torch.func.functional_call(stage, params, (x,))
        return y

    return call


def batch_loss(logits: Tensor, batch: Any) -> Tensor:
    """Mean cross entropy against the targets of the batch."""
    return surprise(logits, batch["targets"])


def make_batch(rows: int, length: int, part: int = 0, parts: int = 1) -> dict[str, Tensor]:
    """One of `parts` equal parts of a batch: inputs and targets, ``int64[rows, length]``."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (parts * rows, length + 1), generator=generator)
    tokens = tokens.chunk(parts)[part]
    return {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


Case = tuple[Callable[[], Any], Callable[[], Sequence[Tensor]], Callable[[], Any]]
"""A step, the gradients of the last one on this rank, and what lets go of them."""


def compare_gradients(cases: Mapping[str, Case]) -> None:
    """Run a step of each case, and raise where its gradients are not those of the first case."""
    reference: list[Tensor] = []
    for label, (run, gradients, clear) in cases.items():
        run()
        values = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients()]
        for value, other in zip(values, reference or values, strict=True):
            difference = float((value - other).norm() / other.norm())
            assert difference < 1e-3, f"a gradient of {label} differs by {difference:.1e}"
        reference = reference or values
        clear()
