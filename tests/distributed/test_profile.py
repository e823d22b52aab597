"""What is measured over processes: all of them take part, or all of them hear why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
from tests.distributed.crew import Crew, Outcome, attempt, values


def linear(weight: Tensor, x: Tensor) -> Tensor:
    return x @ weight


def measured(group: dist.ProcessGroup, steps: list[Any]) -> list[Outcome]:
    """Costs of stages whose first has no input gradient to compute: with each rank's steps, with 1.

    A rank whose steps are None takes a step of the pipeline instead.
    """
    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=4)
    pipe = fpipe.pipeline(
        [linear, linear],
        lambda y, _: y.square().mean(),
        schedule,
        compile=False,
        group=group,
    )
    params = pipe.local([torch.eye(64), torch.eye(64)])
    batch, own = torch.ones(32, 64), steps[group.rank()]

    def profile(steps: Any) -> fpipe.Cost:
        return fpipe.profile(pipe, params, batch, steps=steps)

    first = attempt(pipe.step, params, batch) if own is None else attempt(profile, own)
    return [first, attempt(profile, 1)]


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([2, 3], "fpipe.profile was given steps=2 on rank 0; steps=3 on rank 1: it must be the sa"),
        ([0, 5], "fpipe.profile was given steps=0 on rank 0; steps=5 on rank 1: it must be the sa"),
        (["5", "5"], "fpipe.profile was given steps='5' on ranks 0, 1: it must be the same integ"),
        ([1, None], "rank 1 called pipe.step, but others called fpipe.profile"),
    ],
)
def test_ranks_agree_on_what_is_measured(crew: Crew, steps: list[Any], told: str) -> None:
    # Ranks with more steps called a pipeline that others had not made, or waited for one that
    # had raised alone.
    for first, then in values(crew.run(measured, steps, ranks=range(2))):
        assert told in first.error.text
        assert then.value.comm > 0  # it was 0 where the reader was an I that computes nothing
        assert then.value.i == (0, then.value.i[1])


def measured_apart(group: dist.ProcessGroup) -> fpipe.Cost:
    """Costs of microbatches of two lengths, of which the last rank has none."""
    pipe = fpipe.pipeline(
        [linear, linear],
        lambda y, _: y.square().mean(),
        fpipe.schedules.zb_h1(ranks=2, microbatches=3),
        compile=False,
        group=group,
    )
    params = pipe.local([torch.eye(64), torch.eye(64)])
    lengths = [torch.ones(rows, 64) for rows in (2, 512, 2)]
    batch = None if group.rank() else fpipe.Microbatches(lengths)
    return fpipe.profile(pipe, params, batch, steps=3)


def test_sizes_of_microbatches_are_the_same_on_all_ranks(crew: Crew) -> None:
    first, second = values(crew.run(measured_apart, ranks=range(2)))
    assert first.sizes == second.sizes
    assert first.sizes[0] == first.sizes[2] < 1 < first.sizes[1]
    # What is kept grows with the rows; the times of so small products hardly do.
    assert first.memory_sizes == second.memory_sizes
    assert first.memory_sizes[1] == pytest.approx(256 * first.memory_sizes[0])
    assert first.message[0] * first.memory_sizes[1] == pytest.approx(512 * 64 * 4)


def linked_stages(group: dist.ProcessGroup) -> list[fpipe.Cost]:
    """Costs of stages that hand on messages of 1 KiB and of 4 MiB."""
    pipe = fpipe.pipeline(
        [linear, linear],
        lambda y, _: y.square().mean(),
        fpipe.schedules.zb_h1(ranks=2, microbatches=2),
        compile=False,
        group=group,
    )
    params = pipe.local([torch.eye(64), torch.eye(64)])
    return [fpipe.profile(pipe, params, torch.ones(2 * rows, 64), steps=3) for rows in (4, 16384)]


def test_latency_and_bandwidth_are_two_numbers(crew: Crew) -> None:
    for small, large in values(crew.run(linked_stages, ranks=range(2))):
        assert small.message == (1024, 1024) and large.message == (1 << 22, 1 << 22)
        for cost in (small, large):
            assert cost.comm > 0
            assert 1e-12 < cost.transfer < 1e-7  # from 10 MB/s to 1 TB/s
            assert cost.transfer_between(0, 1) == cost.transfer
        # The latency is not that of moving 4 MiB.
        assert large.comm < small.comm + 4 * large.transfer * (1 << 22)
