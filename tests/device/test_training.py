"""A training step with an optimizer of torch, on CUDA: the numbers of the CPU, and no wait."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch

import fpipe
from fpipe import pytree, schedules
from tests.device.test_one_process import moved, without_waiting
from tests.models import assert_same, mlp

pytestmark = pytest.mark.cuda

SCHEDULE: Final = schedules.zb_h1(ranks=2, microbatches=4)
OPTIMIZERS: Final = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.AdamW, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.Adafactor, {}),
]


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize(("optimizer", "hyper"), OPTIMIZERS)
def test_equal_to_the_cpu(optimizer: Any, hyper: dict[str, Any], max_norm: float | None) -> None:
    model = mlp(2, 8)
    pipe = fpipe.pipeline(model.stages, model.loss, SCHEDULE, compile=False)
    trainer = fpipe.train(pipe, optimizer, lr=0.1, max_norm=max_norm, **hyper)
    ends = []
    for device in ("cpu", "cuda"):
        params, batch = moved(model.params, device), moved(model.batch, device)
        state = trainer.init(params)
        for _ in range(3):
            loss, params, state, norm = trainer.step(params, state, batch)
        assert all(leaf.device.type == device for leaf in pytree.flatten((loss, params))[0])
        ends.append(moved((loss, params, state, norm), "cpu"))
    assert_same(ends[1], ends[0])


def test_a_step_waits_for_nothing() -> None:
    """One that clips waits for the norm, at its end."""
    model = mlp(2, 8)
    pipe = fpipe.pipeline(model.stages, model.loss, SCHEDULE, compile=False)
    trainer = fpipe.train(pipe, torch.optim.AdamW, lr=0.1)
    params, batch = moved(model.params, "cuda"), moved(model.batch, "cuda")
    state = trainer.init(params)
    for _ in range(2):
        _, params, state, _ = trainer.step(params, state, batch)
    with without_waiting():
        trainer.step(params, state, batch)
