"""A loss function that returns more than a loss: a token-weighted sum, and values of all stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe

VOCABULARY, WIDTH, EXPERTS, LENGTH = 7, 4, 3, 5
OUT_DIMS = {"load": 0, "counts": None, "hidden": 0, "tokens": 0, "tied": None, "wrong": 0}


def weighted_model(params: dict[str, Any], batch: dict[str, Tensor]) -> Any:
    """Four stages: a mixture of experts in the second, whose balance is part of the loss."""
    kept = batch["targets"] >= 0
    x = fpipe.cut(torch.tanh(F.embedding(batch["tokens"], params["table"])))
    gate = (x @ params["gate"]).softmax(-1)
    load = gate.mean((0, 1))
    # Work belongs to the stage in which it is done: here, and not where aux is put together.
    aux = {
        "load": load[None],
        "counts": (gate.argmax(-1)[..., None] == torch.arange(EXPERTS)).sum((0, 1)),
    }
    experts = torch.tanh(torch.einsum("blw,ewv->blev", x, params["experts"]))
    x = fpipe.cut(torch.einsum("ble,blev->blv", gate, experts))
    hidden = torch.tanh(x @ params["middle"])
    x = fpipe.cut(hidden)
    logits = x @ params["table"].T
    losses = F.cross_entropy(
        logits.flatten(0, 1), batch["targets"].clamp(min=0).flatten(), reduction="none"
    )
    weight = kept.sum()
    balance = EXPERTS * load.square().sum()
    aux |= {
        "hidden": hidden,
        "tokens": batch["tokens"],
        "tied": params["table"],
        "wrong": ((logits.argmax(-1) != batch["targets"]) & kept).sum(),
    }
    return ((losses * kept.flatten()).sum() + 0.1 * weight * balance, weight), aux


def weighted_sum(params: dict[str, Any], batch: dict[str, Tensor]) -> Any:
    """The same without aux."""
    return weighted_model(params, batch)[0]


def plain_loss(params: dict[str, Any], batch: dict[str, Tensor]) -> Any:
    """The same as a mean with aux, which is no mean over all tokens of the batch."""
    (total, weight), aux = weighted_model(params, batch)
    return total / weight, aux


def make_params() -> dict[str, Any]:
    """Random, in float64."""
    torch.manual_seed(0)
    shapes = {
        "table": (VOCABULARY, WIDTH),
        "gate": (WIDTH, EXPERTS),
        "experts": (EXPERTS, WIDTH, WIDTH),
        "middle": (WIDTH, WIDTH),
    }
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def make_batch() -> dict[str, Tensor]:
    """Nine rows with very different numbers of tokens that count."""
    torch.manual_seed(1)
    lengths = torch.tensor([5, 5, 5, 1, 0, 2, 3, 0, 4])
    targets = torch.randint(VOCABULARY, (9, LENGTH))
    targets[torch.arange(LENGTH) >= lengths[:, None]] = -1
    return {"tokens": torch.randint(VOCABULARY, (9, LENGTH)), "targets": targets}


def microbatches(batch: dict[str, Tensor], count: int = 4) -> list[dict[str, Tensor]]:
    """What a pipeline splits a batch into."""
    columns = {name: leaf.tensor_split(count) for name, leaf in batch.items()}
    return [{name: parts[i] for name, parts in columns.items()} for i in range(count)]


def by_microbatch(params: dict[str, Any], batch: dict[str, Tensor]) -> Tensor:
    """The unpipelined loss of the whole batch: sums over weights, microbatch by microbatch.

    The balance of the experts is that of each microbatch, in a pipeline as here.
    """
    sums, weights = zip(
        *(weighted_model(params, part)[0] for part in microbatches(batch)), strict=True
    )
    return torch.stack(sums).sum() / torch.stack(weights).sum()
