"""A module over processes: the same bits as in one, and all parameters back in one module."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

import fpipe
from fpipe import Schedule, schedules
from tests.distributed.crew import Crew, values
from tests.models import assert_identical
from tests.modules.models import CUTS, detached, language_model, make_batch

RATE = 0.1


def train(
    group: dist.ProcessGroup | None, schedule: Schedule
) -> tuple[list[fpipe.Step], dict[str, Tensor]]:
    """Two steps; a rank changes only the parameters whose gradients it gets."""
    module = language_model()
    pipe = fpipe.from_module(module, schedule=schedule, cuts=CUTS, compile=False, group=group)
    params, steps = detached(module), []
    for _ in range(2):
        steps.append(pipe.step(params, make_batch()))
        params = {
            name: value if (grad := steps[-1].grads[name]) is None else value - RATE * grad
            for name, value in params.items()
        }
    target = language_model()
    pipe.load_into(target, params)
    return steps, detached(target)


def test_module_over_ranks(crew: Crew) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=4)
    crew.start(train, schedule, ranks=range(2))
    steps, loaded = train(None, schedule)
    parts = values(crew.collect())
    for number, whole in enumerate(steps):
        merged: dict[str, Any] = {}
        for rank_steps, _ in parts:
            assert_identical(rank_steps[number].loss, whole.loss)
            grads = rank_steps[number].grads
            merged |= {name: grad for name, grad in grads.items() if grad is not None}
        assert_identical(merged, whole.grads)
    for _, rank_loaded in parts:
        assert_identical(rank_loaded, loaded)


class Other(nn.Linear):
    """Not what was trained."""


def load_wrong(group: dist.ProcessGroup, schedule: Schedule) -> None:
    """Rank 1 gives another module than rank 0."""
    module = language_model()
    pipe = fpipe.from_module(module, schedule=schedule, cuts=["blocks.1"], group=group)
    pipe.load_into(Other(2, 2) if group.rank() else module, detached(module))


def test_module_that_fits_on_one_rank_only_is_refused_on_both(crew: Crew) -> None:
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    here, there = crew.run(load_wrong, schedule, ranks=range(2))
    assert "another rank cannot load its parameters" in here.error.text
    assert "params and Other differ in 19 names" in there.error.text
