"""A loss function with a state: normalisations in two stages, a count, and what never changes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe
from fpipe.nn import BatchStats, batch_norm

CHANNELS = 3


def stateful_model(params: dict[str, Any], state: dict[str, Any], batch: dict[str, Tensor]) -> Any:
    """Four stages; aux holds what is normalised."""
    before = F.conv1d(batch["x"], params["convolution"])
    x, first = batch_norm(before, state["first"], params["scale"])
    x = fpipe.cut(torch.tanh(x))
    x = fpipe.cut(torch.tanh(x @ params["middle"]))
    inside = torch.tanh(x @ params["middle"])
    # A moving average that is added to what it is the average of.
    drift = 0.9 * state["drift"] + 0.1 * inside.mean((0, 2))
    inside = inside + state["drift"][:, None]
    x, second = batch_norm(inside, state["second"], momentum=0.3)
    x = fpipe.cut(x)
    loss = (x.flatten(1) @ params["head"] - batch["y"]).square().mean()
    new = {
        "first": first,
        "second": second,
        "drift": drift,
        "count": state["count"] + 1,
        "fixed": state["fixed"],
    }
    return loss, new, {"before": before, "inside": inside}


def without_aux(params: Any, state: Any, batch: Any) -> Any:
    """The same without aux."""
    return stateful_model(params, state, batch)[:2]


def make_params() -> dict[str, Any]:
    """Random, in float64."""
    torch.manual_seed(0)
    shapes = {
        "convolution": (CHANNELS, 2, 2),
        "scale": (CHANNELS,),
        "middle": (4, 4),
        "head": (4 * CHANNELS, 2),
    }
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def make_state() -> dict[str, Any]:
    """As at the start of training, but for numbers that are easy to tell apart."""
    zeros, ones = torch.zeros(CHANNELS).double(), torch.ones(CHANNELS).double()
    return {
        "first": BatchStats(zeros + 0.5, ones),
        "second": BatchStats(zeros, ones * 2),
        "drift": zeros + 0.25,
        "count": torch.tensor(7),
        "fixed": torch.ones(2),
    }


def make_batch(rows: int = 8) -> dict[str, Tensor]:
    """Rows that four microbatches divide: with nine, stages are traced for two sizes."""
    torch.manual_seed(1)
    return {"x": torch.randn(rows, 2, 5).double() + 1, "y": torch.randn(rows, 2).double()}


def by_microbatch(params: Any, state: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Any]:
    """The unpipelined loss and what comes with it: microbatch by microbatch, in order."""
    rows, total, aux = len(batch["x"]), torch.zeros(()).double(), []
    for number in range(4):
        part = {name: leaf.tensor_split(4)[number] for name, leaf in batch.items()}
        loss, state, own = stateful_model(params, state, part)
        state = fpipe.pytree.tree_map(torch.Tensor.detach, state)
        total = total + loss * (len(part["x"]) / rows)
        aux.append(own)
    merged = {name: torch.cat([own[name] for own in aux]) for name in aux[0]}
    return total, (state, merged)
