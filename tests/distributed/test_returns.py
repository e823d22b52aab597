"""What a loss function returns beside the loss, over processes."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
from fpipe import Schedule, pytree, schedules
from tests import state_model
from tests.distributed.crew import Crew, Outcome, attempt, values
from tests.models import assert_identical, rand
from tests.returns_model import OUT_DIMS, make_batch, make_params, weighted_model
from tests.state_model import make_state, without_aux


def run_case(group: dist.ProcessGroup | None, schedule: Schedule) -> tuple[Any, Any]:
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
    crew.start(run_case, schedule, ranks=range(2))
    parts = values(crew.collect())
    whole, whole_forward = run_case(None, schedule)
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


def unmergeable(group: dist.ProcessGroup) -> list[Outcome]:
    schedule = schedules.gpipe(ranks=2, microbatches=2)
    function = fpipe.pipeline(
        lambda w, x: ((fpipe.cut(x * w)).sum(), {"y": x}),
        schedule=schedule, has_aux=True, out_dims=1, compile=False, group=group,
    )  # fmt: skip
    chain = fpipe.pipeline(
        [torch.mul, torch.mul], lambda y, _: y.sum(), schedule, compile=False, group=group
    )
    w, x = torch.tensor(1.0), torch.ones(4)
    return [
        attempt(function.step, w, x),
        attempt(lambda: chain.forward([w, w], x, out_dims=1)),
        attempt(chain.forward, [w, w], x[:3].outer(x[:2])),
        attempt(function.value, w, x),
    ]


def test_what_cannot_be_merged_is_refused_on_every_rank(crew: Crew) -> None:
    """Whichever of them holds it, so that all go on from the same place."""
    crew.start(unmergeable, ranks=range(2))
    for step, forward, right, value in values(crew.collect()):
        assert step.error.text.startswith("out_dims is 1 for aux['y'] of shape (2,)")
        assert forward.error.text.startswith("out_dims is 1 for output of shape (2,)")
        assert right.failure is None and value.value == 2  # the mean of two


def train_returning(
    group: dist.ProcessGroup | None, schedule: Schedule, batch_norm: str
) -> list[Any]:
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


def step_after_inference(group: dist.ProcessGroup) -> list[bool]:
    schedule = schedules.zbv(ranks=2, microbatches=4)
    pipe = fpipe.pipeline(
        without_aux, schedule=schedule, has_state=True, compile=False, group=group
    )
    params, state, batch = state_model.make_params(), make_state(), state_model.make_batch()
    with torch.inference_mode():
        pipe.value(params, state, batch)
    after = pipe.step(params, state, batch).state
    return [leaf.is_inference() for leaf in pytree.flatten(after)[0]]


def test_what_is_kept_of_a_call_in_inference_mode_serves_any_other(crew: Crew) -> None:
    # Buffers were tensors of that mode, which nobody may write to or differentiate outside of it.
    crew.start(step_after_inference, ranks=range(2))
    assert not any(chain(*values(crew.collect())))


@pytest.mark.parametrize("batch_norm", ["microbatch", "deferred"])
def test_state_is_the_same_on_every_rank(crew: Crew, batch_norm: str) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=4)
    crew.start(train_returning, schedule, batch_norm, ranks=range(2))
    parts = values(crew.collect())
    whole = train_returning(None, schedule, batch_norm)
    for part in parts:
        for found, expected in zip(part[:2], whole[:2], strict=True):
            assert_identical(found.loss, expected.loss)
            assert_identical(found.state, expected.state)
        assert_identical(part[2], whole[2])
    for name, expected in whole[1].grads.items():
        held = [part[1].grads[name] for part in parts if part[1].grads[name] is not None]
        assert held and all(torch.equal(own, expected) for own in held)
