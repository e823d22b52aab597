"""A stage may read a parameter, or a leaf of the batch, in microbatches of some sizes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
from fpipe import schedules
from tests.models import assert_same

ROWS, MICROBATCHES = 8, 3  # of 3, 3 and 2 rows
FAMILIES = ["one_f_one_b", "zb_h1"]
every_family = pytest.mark.parametrize("family", FAMILIES)
every_size = pytest.mark.parametrize("size", [3, 2])
Params = dict[str, Tensor]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def problem() -> tuple[Params, Params]:
    torch.manual_seed(0)
    params = {name: draw(4) for name in ("a", "b", "c", "d")}
    return params, {"x": draw(ROWS, 4), "z": draw(ROWS, 4)}


def reading(size: int, num_stages: int) -> Callable[[Any, Any], Tensor]:
    """Reads `a` in every microbatch, `b` and the leaf `z` in those of `size` rows, `c` in others.

    `b` is read in two stages, and so is `d`, but by microbatches of `size` rows in the first alone.
    """

    def loss_fn(params: Params, batch: Params) -> Tensor:
        hidden = batch["x"]
        special = hidden.shape[0] == size
        for stage in range(num_stages):
            hidden = torch.tanh(hidden * params["a"])
            if stage == 0:
                hidden = hidden * params["b"] * batch["z"] if special else hidden * params["c"]
            if stage == 1 and special:
                hidden = hidden + params["b"] * batch["z"]
            if stage == 1 or (stage == 0 and special):
                hidden = hidden * params["d"]
            if stage < num_stages - 1:
                hidden = fpipe.cut(hidden)
        return hidden.square().sum()

    return loss_fn


def plain(loss_fn: Callable[[Any, Any], Tensor], params: Params, batch: Params) -> Any:
    """The gradients by both, of the sum over the microbatches."""

    def total(params: Params, batch: Params) -> Tensor:
        parts = zip(*(batch[name].tensor_split(MICROBATCHES) for name in ("x", "z")), strict=True)
        losses = [loss_fn(params, {"x": x, "z": z}) for x, z in parts]
        return torch.stack(losses).sum()

    return torch.func.grad_and_value(total, (0, 1))(params, batch)


def pipeline(
    family: str, size: int, group: dist.ProcessGroup | None = None
) -> tuple[fpipe.Pipeline, Callable[[Any, Any], Tensor]]:
    schedule = schedules.get(family, ranks=2, microbatches=MICROBATCHES)
    loss_fn = reading(size, schedule.num_stages)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, reduction="sum", compile=False, group=group)
    return pipe, loss_fn


@every_size
@every_family
def test_parameters_and_batch(family: str, size: int) -> None:
    """A sum that only a later microbatch begins raised a KeyError.

    The rows of the microbatches that read a leaf were taken for those of the whole batch.
    """
    pipe, loss_fn = pipeline(family, size)
    params, batch = problem()
    expected, loss = plain(loss_fn, params, batch)
    found = fpipe.grad(pipe, ("params", "batch")).step(params, batch)
    assert_same(found.loss, loss)
    assert_same(found.grads, expected)


@every_size
def test_stages(size: int) -> None:
    """The same for a list of stages, whose parameters are apart."""

    def stage(params: Params, x: Tensor) -> Tensor:
        hidden = torch.tanh(x * params["a"])
        return hidden * params["b"] if x.shape[0] == size else hidden * params["c"]

    def loss(y: Tensor, batch: Tensor) -> Tensor:
        return y.square().sum()

    def total(params: Any, x: Tensor) -> Tensor:
        parts = [stage(params[1], stage(params[0], part)) for part in x.tensor_split(MICROBATCHES)]
        return torch.stack([part.square().sum() for part in parts]).sum()

    params = [problem()[0], problem()[0]]
    x = problem()[1]["x"]
    expected, value = torch.func.grad_and_value(total)(params, x)
    for family in FAMILIES:
        schedule = schedules.get(family, ranks=2, microbatches=MICROBATCHES)
        pipe = fpipe.pipeline([stage, stage], loss, schedule, reduction="sum", compile=False)
        found = pipe.step(params, x)
        assert_same(found.loss, value)
        assert_same(found.grads, expected)
