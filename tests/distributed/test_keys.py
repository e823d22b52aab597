"""A key over processes: every rank makes the keys of its own microbatches, and the same ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import fpipe
from fpipe import Schedule, random, schedules
from tests import keyed_model as keyed
from tests.distributed.crew import Crew, values
from tests.models import assert_identical, assert_same, mean_square, mlp


def steps_with_keys(group: dist.ProcessGroup | None, schedule: Schedule, seeds: Any) -> Any:
    """A step of a chain and one of a function."""
    model = mlp(4, 6)
    rank = 0 if group is None else group.rank()
    key = None if seeds[rank] is None else random.key(seeds[rank])
    chain = fpipe.pipeline(
        keyed.stages(4), mean_square, schedule, compile=False, group=group, remat="full"
    )
    function = fpipe.pipeline(
        keyed.loss_fn, schedule=schedule, has_key=True, compile=False, group=group
    )
    return [
        chain.step(chain.local(model.params), model.batch, key),
        function.step(model.params, model.batch, key),
    ]


def test_draws_what_one_process_draws(crew: Crew) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=3)
    ranks = values(crew.run(steps_with_keys, schedule, (5, 5), ranks=range(2)))
    expected = steps_with_keys(None, schedule, (5, 5))
    model = mlp(4, 6)
    plain = [
        keyed.unpipelined(one, model.params, model.batch, random.key(5), 3)
        for one in (keyed.chained, keyed.loss_fn)
    ]
    for number in range(2):
        assert_same(expected[number], plain[number])
        for rank, found in enumerate(ranks):
            assert_identical(found[number].loss, expected[number].loss)
            for stage in schedule.stages_of(rank):
                assert_identical(found[number].grads[stage], expected[number].grads[stage])


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        ((5, 6), "rank 1 got another key than the other ranks: pass the same key on all"),
        ((5, None), "rank 1 cannot run this step: BatchError: key=None, but the stages read a key"),
    ],
)
def test_ranks_with_other_keys_are_told(crew: Crew, seeds: Any, message: str) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=3)
    for outcome in crew.run(steps_with_keys, schedule, seeds, ranks=range(2)):
        assert message in outcome.error.text
