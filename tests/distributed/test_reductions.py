"""`reduce=`: the user's own reduction of gradients over replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
from fpipe import reductions, schedules
from fpipe.program.async_collectives import ReductionUnderWay
from tests.distributed import replicas
from tests.distributed.actors import Group
from tests.distributed.crew import Crew, mesh_of, values

SCHEDULE = schedules.zb_h1(ranks=2, microbatches=4)


def gathered_sum(bucket: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the buckets of all replicas, or of their rows for this one."""
    every = [torch.empty_like(bucket) for _ in range(group.size())]
    dist.all_gather(every, bucket, group=group)
    total = torch.stack(every).sum(0)
    return total if total.dim() == 1 else total[group.rank()].clone()


def later(bucket: Tensor, group: dist.ProcessGroup) -> Any:
    """The same, as a future."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(gathered_sum(bucket, group))
    return future


def narrow(bucket: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A sum in another dtype."""
    return bucket.flatten()[:1].float()


@pytest.mark.parametrize("reduce", [gathered_sum, later])
def test_the_answer_is_that_of_torch(crew: Crew, reduce: Any) -> None:
    policies: Any = [None, (1, 2)]
    rest: Any = ("mean", [5, 11], {"reduce": reduce, "bucket_bytes": 100})
    values(crew.run(replicas.steps, SCHEDULE, (2, 2), ("dp", "pp"), ["dp"], policies, *rest))


def test_two_dimensions_are_reduced_one_after_the_other(crew: Crew) -> None:
    names = ("replicate", "shard", "pp")
    schedule = schedules.gpipe(ranks=1, microbatches=4)
    rest: Any = ("mean", None, {"reduce": gathered_sum})
    values(crew.run(replicas.steps, schedule, (2, 2, 1), names, list(names[:2]), [None], *rest))


def errors_of_bf16(group: Group, divided: bool) -> list[float]:
    """How far gradients that were added up in bfloat16 are off, relative to their norm."""
    mesh = mesh_of((2, 2), ("dp", "pp"))
    own = replicas.rows_of(mesh, ["dp"], replicas.data(), None)
    grads = []
    for reduce in (None, reductions.bf16):
        pipe = replicas.recorded(mesh, ("dp",), 2, reduce=reduce).with_schedule(SCHEDULE)
        params = pipe.local(replicas.parameters(2))
        placed = pipe.shard(params) if divided else pipe.replicate(params)
        found = pipe.step(placed, own).grads[pipe.rank or 0]
        grads.append([g.full_tensor() if divided else g for g in found.values()])
    return [float((b - a).norm() / a.norm()) for a, b in zip(*grads, strict=True)]


@pytest.mark.parametrize("divided", [True, False])
def test_bf16_rounds_to_eight_bits(crew: Crew, divided: bool) -> None:
    errors = [e for own in values(crew.run(errors_of_bf16, divided)) for e in own]
    assert all(0 < error < 2**-7 for error in errors)


def refused_reduction(group: Group, reduce: Any) -> str:
    """The error of a step whose reduction returns something wrong."""
    mesh = mesh_of((2, 2), ("dp", "pp"))
    pipe = replicas.recorded(mesh, ("dp",), 2, reduce=reduce).with_schedule(SCHEDULE)
    params = pipe.shard(pipe.local(replicas.parameters(2)))
    try:
        pipe.step(params, replicas.rows_of(mesh, ["dp"], replicas.data(), None))
    except fpipe.FpipeError as error:
        return str(error)
    return ""


def test_a_wrong_sum_is_told() -> None:
    with Crew(4) as crew:
        errors = values(crew.run(refused_reduction, narrow))
    assert any("reduce=narrow has made torch.float32 of shape (1,)" in error for error in errors)
    assert all(errors)


@pytest.mark.parametrize("wrong", [torch.zeros(2, 3), torch.zeros(2), torch.zeros(3).double(), 0])
def test_a_sum_has_the_shape_of_a_row_and_its_dtype(wrong: Any) -> None:
    bucket = torch.zeros(2, 3)
    assert ReductionUnderWay(narrow, bucket, torch.ones(3)).wait().equal(torch.ones(3))
    with pytest.raises(fpipe.StageError, match=r"it must return the sum over the group, .* \(3,\)"):
        ReductionUnderWay(narrow, bucket, wrong).wait()


def test_a_reduction_needs_replicas() -> None:
    with pytest.raises(fpipe.StageError, match=r"must be a function .* beside data="):
        fpipe.pipeline([replicas.stage] * 2, replicas.mean_square, SCHEDULE, reduce=gathered_sum)
