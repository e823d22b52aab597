"""What a loss function returns beside the loss, over processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
from fpipe import Schedule, schedules
from tests import state_model
from tests.distributed.crew import Crew, values
from tests.models import assert_identical, rand
from tests.returns_model import OUT_DIMS, make_batch, make_params, weighted_model
from tests.state_model import make_state, without_aux


def run(group: dist.ProcessGroup | None, schedule: Schedule) -> tuple[Any, Any]:
    pipe = fpipe.pipeline(
        weighted_model,
        schedule=schedule,
        reduction="weighted",
        has_aux=True,
        out_dims=OUT_DIMS,
        compile=False,
        group=group,
    )
    params, batch = make_params(), make_batch()
    return pipe.step(params, batch), pipe.forward(params, batch)


def test_weighted_sum_and_aux_have_the_bits_of_one_process(crew: Crew) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=4)
    crew.start(run, schedule, ranks=range(2))
    parts = values(crew.collect())
    whole, whole_forward = run(None, schedule)
    # Stages 0 and 3 are on rank 0, 1 and 2 on rank 1; batch and parameters are the last stage's.
    makers = {"load": 1, "counts": 1, "hidden": 1, "tokens": 0, "tied": 0, "wrong": 0}
    for rank, (step, forward) in enumerate(parts):
        assert_identical(step.loss, whole.loss)
        assert_identical(forward.loss, whole.loss)
        for name, gradient in step.grads.items():
            if gradient is not None:
                assert_identical(gradient, whole.grads[name])
        for name, maker in makers.items():
            for found, expected in ((step.aux, whole.aux), (forward.aux, whole_forward.aux)):
                if rank == maker:
                    assert_identical(found[name], expected[name])
                else:
                    assert found[name] is None
    assert all(any(step.grads[name] is not None for step, _ in parts) for name in whole.grads)


def centred(params: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
    """The aux of two rows is made in the last stage, and that of one row is what the first made."""
    h = fpipe.cut(torch.sin(batch @ params))
    return h.square().mean(), h - h.mean(0) if len(h) > 1 else h


def uneven(group: dist.ProcessGroup | None, out_dims: int | None) -> fpipe.StepAux:
    schedule = schedules.one_f_one_b(ranks=2, microbatches=3)
    pipe = fpipe.pipeline(
        centred,
        schedule=schedule,
        has_aux=True,
        out_dims=out_dims,
        compile=False,
        group=group,
    )
    found: fpipe.StepAux = pipe.step(rand(3, 3), rand(4, 3))
    return found


@pytest.mark.parametrize("out_dims", [0, None])
def test_aux_that_microbatches_make_in_different_stages_is_whole_on_one_rank(
    crew: Crew, out_dims: int | None
) -> None:
    crew.start(uneven, out_dims, ranks=range(2))
    first, last = values(crew.collect())
    expected = uneven(None, out_dims)
    assert first.aux is None
    assert_identical(last.aux, expected.aux)


def train(group: dist.ProcessGroup | None, schedule: Schedule, batch_norm: str) -> list[Any]:
    pipe = fpipe.pipeline(
        without_aux,
        schedule=schedule,
        has_state=True,
        batch_norm=batch_norm,
        compile=False,
        group=group,
    )
    params, state, batch = state_model.make_params(), make_state(), state_model.make_batch()
    results = []
    for _ in range(2):
        results.append(pipe.step(params, state, batch))
        state = results[-1].state
    return [*results, pipe.value(params, state, batch)]


@pytest.mark.parametrize("batch_norm", ["microbatch", "deferred"])
def test_state_is_the_same_on_every_rank(crew: Crew, batch_norm: str) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=4)
    crew.start(train, schedule, batch_norm, ranks=range(2))
    parts = values(crew.collect())
    whole = train(None, schedule, batch_norm)
    for part in parts:
        for found, expected in zip(part[:2], whole[:2], strict=True):
            assert_identical(found.loss, expected.loss)
            assert_identical(found.state, expected.state)
        assert_identical(part[2], whole[2])
    for name, expected in whole[1].grads.items():
        held = [part[1].grads[name] for part in parts if part[1].grads[name] is not None]
        assert held and all(torch.equal(own, expected) for own in held)
