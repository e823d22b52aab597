"""A module that draws, over processes: the numbers of one process."""

from __future__ import annotations

import torch.distributed as dist

import fpipe
from fpipe import Schedule, random, schedules
from tests.distributed.crew import Crew, values
from tests.models import assert_identical, assert_same
from tests.modules import dropping
from tests.modules.helpers import by_microbatches, detached, squares


def step_with_key(group: dist.ProcessGroup | None, schedule: Schedule) -> fpipe.Step:
    module = dropping.dropping_module()
    pipe = fpipe.from_module(
        module,
        schedule=schedule,
        cuts=dropping.CUTS,
        loss=squares,
        has_key=True,
        remat="full",
        compile=False,
        group=group,
    )
    result: fpipe.Step = pipe.step(detached(module), dropping.dropping_batch(), random.key(3))
    return result


def test_module_draws_what_one_process_draws(crew: Crew) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=4)
    crew.start(step_with_key, schedule, ranks=range(2))
    whole = step_with_key(None, schedule)
    for part in values(crew.collect()):
        assert_identical(part.loss, whole.loss)
        for name, grad in part.grads.items():
            if grad is not None:
                assert_identical(grad, whole.grads[name])
    module, batch = dropping.dropping_module(), dropping.dropping_batch()
    expected = by_microbatches(module, batch, 4, key=random.key(3))
    assert_same(tuple(whole), tuple(expected))
