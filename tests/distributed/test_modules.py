"""A module over processes: the same bits as in one, and all parameters back in one module."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fpipe
from fpipe import Schedule, schedules
from tests.distributed.crew import Crew, values
from tests.models import assert_identical
from tests.modules.models import CUTS, detached, language_model, make_batch, unpipelined

RATE = 0.1


def train(
    group: dist.ProcessGroup | None, schedule: Schedule
) -> tuple[list[fpipe.Step], dict[str, Tensor]]:
    """Two steps; a rank changes only the parameters whose gradients it gets."""
    module = language_model()
    pipe = fpipe.from_module(module, schedule=schedule, cuts=CUTS, compile=False, group=group)
    # In an order of its own, which is not that in which a dict is flattened.
    params, steps = OrderedDict(reversed(detached(module).items())), []
    for _ in range(2):
        steps.append(pipe.step(params, make_batch()))
        for name, grad in steps[-1].grads.items():
            params[name] = params[name] if grad is None else params[name] - RATE * grad
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
        assert_identical(merged, dict(whole.grads))
    for _, rank_loaded in parts:
        assert_identical(rank_loaded, loaded)


def choose(group: dist.ProcessGroup, schedule: Schedule) -> tuple[Any, fpipe.Step]:
    """Measure, and run a step."""
    module = language_model()
    pipe = fpipe.from_module(
        module,
        schedule=schedule,
        stages=4,
        example=make_batch(),
        measure=True,
        compile=False,
        group=group,
    )
    return pipe.balance, pipe.step(detached(module), make_batch())


def test_every_rank_takes_the_cuts_that_the_first_has_measured(crew: Crew) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=4)
    first, second = values(crew.run(choose, schedule, ranks=range(2)))
    assert first[0] == second[0] and first[0].unit == "s"
    expected = unpipelined(language_model(), detached(language_model()), make_batch())
    torch.testing.assert_close(second[1].loss, expected.loss)


def measure_nothing(group: dist.ProcessGroup, schedule: Schedule) -> None:
    module = language_model().to("meta")
    options: Any = {"example": make_batch(), "measure": True, "group": group}
    options["buffers"] = {"mask": language_model().mask}
    fpipe.from_module(module, schedule=schedule, **options)


def test_failure_to_measure_is_told_on_every_rank(crew: Crew) -> None:
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    here, there = crew.run(measure_nothing, schedule, ranks=range(2))
    assert "measure=True runs the module, but module['blocks.0.norm.bias']" in here.error.text
    assert "rank 0 could not measure the parts of the module" in there.error.text


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


def step_each_model(group: dist.ProcessGroup, schedule: Schedule) -> list[fpipe.Step]:
    """One step of every Hugging Face model."""
    # Not at the head of the file: only ranks that do this take the seconds of the import.
    from tests.modules import hugging_face

    steps = []
    for name, architecture in hugging_face.ARCHITECTURES.items():
        module = hugging_face.build(name, 2)
        pipe = fpipe.from_module(
            module,
            schedule=schedule,
            cuts=architecture.cuts(2),
            loss=hugging_face.cross_entropy,
            compile=False,
            group=group,
        )
        steps.append(pipe.step(detached(module), hugging_face.make_batch(name)))
    return steps


def test_hugging_face_models_over_ranks(crew: Crew) -> None:
    crew.start(step_each_model, schedules.zb_h1(ranks=2, microbatches=2), ranks=range(2))
    from tests.modules import hugging_face

    parts: list[list[fpipe.Step]] = values(crew.collect(timeout=200))
    for name, *steps in zip(hugging_face.ARCHITECTURES, *parts, strict=True):
        module = hugging_face.build(name, 2)
        batch = hugging_face.make_batch(name)
        expected = unpipelined(module, detached(module), batch, hugging_face.cross_entropy)
        merged: dict[str, Any] = {}
        for step in steps:
            torch.testing.assert_close(step.loss, expected.loss, rtol=1e-10, atol=0)
            merged |= {key: grad for key, grad in step.grads.items() if grad is not None}
        torch.testing.assert_close(merged, expected.grads, rtol=1e-10, atol=1e-10)
