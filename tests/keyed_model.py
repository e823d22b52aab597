"""Models that draw random numbers from keys, and what they compute without a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

import fpipe
from fpipe import Stage, Step, random
from tests.models import mean_square, mlp_first, mlp_layer


def first(p: Any, batch: Any, key: Tensor) -> Tensor:
    return random.dropout(key, mlp_first(p, batch), 0.4)


def noisy(p: Any, x: Tensor, key: Tensor) -> Tensor:
    return mlp_layer(p, random.dropout(key, x, 0.3))


def masked(p: Any, x: Tensor, batch: Any, key: Tensor) -> Tensor:
    """Reads the microbatch too."""
    return noisy(p, x, key) + 0.1 * batch["x"]


def stages(count: int) -> list[Stage]:
    """A chain whose every stage reads a key but the last, which draws none."""
    middle = [Stage(noisy, reads_key=True)] * (count - 3)
    last = [Stage(masked, reads_batch=True, reads_key=True), Stage(mlp_layer)]
    return [Stage(first, reads_key=True), *middle, *last]


def loss_fn(params: Any, batch: Any, key: Tensor) -> Tensor:
    """One function of four stages. A mask is drawn in the first and used again in the last."""
    keys = random.split(key)
    shared = random.bernoulli(keys[0], 0.6, batch["x"].shape)
    x = batch["x"] * shared
    for number, own in enumerate(params):
        x = mlp_layer(own, x)
        if number == 1:
            x = x + 0.1 * random.normal(keys[1], x.shape, x.dtype)
        if number < len(params) - 1:
            x = fpipe.cut(x)
    return mean_square(x * shared, batch)


def chained(params: Any, batch: Any, key: Tensor) -> Tensor:
    """The loss of the chain of stages for one microbatch, whose key this is."""
    x = batch
    for number, (stage, own) in enumerate(zip(stages(len(params)), params, strict=True)):
        more = [batch] if stage.reads_batch else []
        keys = {"key": random.fold_in(key, number)} if stage.reads_key else {}
        x = stage.fn(own, x, *more, **keys)
    return mean_square(x, batch)


def unpipelined(one: Any, params: Any, batch: Any, key: Tensor, microbatches: int) -> Step:
    """Loss and gradients of the plain function, each microbatch with its own key."""

    def whole(own: Any) -> Tensor:
        rows = len(batch["x"])
        parts = {name: leaf.tensor_split(microbatches) for name, leaf in batch.items()}
        total = torch.zeros((), dtype=torch.float64)
        for m in range(microbatches):
            part = {name: leaves[m] for name, leaves in parts.items()}
            loss = one(own, part, random.fold_in(key, m))
            total = total + loss * len(part["x"]) / rows
        return total

    grads, value = grad_and_value(whole)(params)
    return Step(value, grads)
