"""A function that was cut, over processes: every rank gets the whole gradient of what it reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import fpipe
from fpipe import Schedule, schedules, tree
from tests.cut_model import IN_DIMS, language_model, make_batch, make_params
from tests.distributed.crew import Crew, values
from tests.models import assert_identical


def step(group: dist.ProcessGroup | None, schedule: Schedule) -> fpipe.Step:
    pipe = fpipe.pipeline(
        language_model, schedule=schedule, in_dims=IN_DIMS, compile=False, group=group
    )
    return pipe.step(make_params(), make_batch())


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.zbv(ranks=2, microbatches=4),
        schedules.interleaved_zero_bubble(ranks=2, microbatches=4),
        schedules.one_f_one_b(ranks=4, microbatches=4),
    ],
    ids=lambda schedule: schedule.name,
)
def test_shared_parameter_has_the_same_bits_on_every_rank(crew: Crew, schedule: Schedule) -> None:
    crew.start(step, schedule, ranks=range(schedule.num_ranks))
    parts: list[fpipe.Step] = values(crew.collect())
    expected = step(None, schedule)
    held: dict[str, Any] = {}
    for part in parts:
        assert_identical(part.loss, expected.loss)
        for path, grad, whole in zip(
            tree.paths(tree.structure(make_params())),
            *(leaves(result.grads) for result in (part, expected)),
            strict=True,
        ):
            if grad is not None:
                assert_identical(grad, whole)
                held.setdefault(path, []).append(grad)
    # The table is read by the first and the last stage; everything else by one stage or by none.
    readers = {schedule.placement[0], schedule.placement[-1]}
    assert len(held["['table']"]) == len(readers)
    assert all(len(held[path]) == 1 for path in held if "blocks" in path)


def leaves(grads: Any) -> list[Any]:
    """The gradients in flat order, None where there is none."""
    spec = tree.structure(make_params())
    return list(spec.flatten_up_to(grads))
