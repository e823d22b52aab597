"""Layers that are divided among processes beside a pipeline, as docs/distributed.md shows it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fpipe
from fpipe import Schedule, schedules
from tests.distributed.actors import Group
from tests.distributed.crew import Crew, attempt, mesh_of, values
from tests.models import assert_same

MESHES = [("tp", "pp"), ("pp", "tp")]


class Enter(torch.autograd.Function):
    """The same on every process of a group, whose gradients add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return collectives.all_reduce(grad.contiguous(), "sum", ctx.group), None


class Leave(torch.autograd.Function):
    """The sum over a group, with the same gradient on each of its processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return collectives.all_reduce(x.contiguous(), "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


class Block(nn.Module):
    """Two matrices, of which each process of `group` has its part."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        parts = 1 if group is None else group.size()
        self.group = group
        self.into = nn.Linear(4, 8 // parts, bias=False, dtype=torch.float64)
        self.out = nn.Linear(8 // parts, 4, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return x + self.out(torch.tanh(self.into(x)))
        part = self.out(torch.tanh(self.into(Enter.apply(x, self.group))))
        return x + Leave.apply(part, self.group)


def part_of(value: Tensor, name: str, mesh: DeviceMesh) -> Tensor:
    """What this process has of a matrix."""
    parts = value.chunk(mesh["tp"].size(), 0 if "into" in name else 1)
    return parts[mesh["tp"].get_local_rank()].contiguous()


def mean_square(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


def step_of(mesh: DeviceMesh, schedule: Schedule, kind: str, **options: Any) -> None:
    """A step of a pipeline with a divided layer a stage, against autograd on whole ones."""
    torch.manual_seed(0)
    layers = schedule.num_stages
    whole = nn.Sequential(*(Block(None) for _ in range(layers)))
    x = torch.randn(8, 4, dtype=torch.float64)
    value = mean_square(whole(x), None)
    value.backward()
    divided = nn.Sequential(*(Block(mesh.get_group("tp")) for _ in range(layers)))
    params = {name: part_of(p.detach(), name, mesh) for name, p in whole.named_parameters()}
    grads: dict[str, Any] = {}
    if kind == "module":
        pipe: Any = fpipe.from_module(
            divided,
            schedule=schedule,
            cuts=[str(layer) for layer in range(layers - 1)],
            loss=mean_square,
            mesh=mesh,
            **options,
        )
        loss, grads = pipe.step(params, {"input": x})
    else:
        stages, parts = [], []
        for layer in range(layers):
            stage = divided[layer : layer + 1]
            stages.append(lambda p, x, stage=stage: torch.func.functional_call(stage, p, (x,)))
            names = [name for name, _ in stage.named_parameters()]
            parts.append({name: params[name] for name in names})
        pipe = fpipe.pipeline(stages, mean_square, schedule, mesh=mesh, **options)
        loss, by_stage = pipe.step(pipe.local(parts), x)
        for part in by_stage:
            grads |= part or {}
    assert_same(loss, value.detach())
    found = {name: grad for name, grad in grads.items() if grad is not None}
    assert len(found) == layers
    for name, grad in found.items():
        expected = whole.get_parameter(name).grad
        assert expected is not None
        assert_same(grad, part_of(expected, name, mesh))


def steps_of_divided(group: Group, names: tuple[str, str]) -> None:
    mesh = mesh_of((2, 2), names)
    zero_bubble, waves = (
        make(ranks=2, microbatches=4) for make in (schedules.zb_h1, schedules.zbv)
    )
    kinds = ("stages", "module") if names == ("tp", "pp") else ("module", "stages")
    step_of(mesh, zero_bubble, kinds[0], compile=False)
    step_of(mesh, waves, kinds[1], compile=False, remat="full")
    if names == ("tp", "pp"):  # those of the other order are compiled in test_tensor_parallel
        step_of(mesh, zero_bubble, "stages", compile=True)


@pytest.mark.parametrize("names", MESHES, ids="-".join)
def test_divided_layers_train_as_whole_ones(crew: Crew, names: tuple[str, str]) -> None:
    """The groups of a mesh dimension have other names on each rank of a pipeline."""
    values(crew.run(steps_of_divided, names))


def gathered(group: Group, compile: bool) -> None:
    """A step in which replicas hold a part of each parameter, and rows of their own."""
    mesh = mesh_of((2, 2), ("dp", "pp"))
    replicas, own = mesh.get_group("dp"), mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    whole = [torch.randn(4, 4, dtype=torch.float64) for _ in range(2 if compile else 4)]
    batch = torch.randn(8, 4, dtype=torch.float64)

    def stage(w: Tensor, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ collectives.all_gather_tensor(w, 0, replicas))

    def plain(params: list[Tensor]) -> Tensor:
        x = batch
        for w in params:
            x = x + torch.tanh(x @ w)
        return x.square().mean()

    expected, value = torch.func.grad_and_value(plain)(whole)
    make = schedules.zb_h1 if compile else schedules.zbv  # the first has fewer kernels
    schedule = make(ranks=2, microbatches=4)
    stages = [stage] * schedule.num_stages
    pipe = fpipe.pipeline(stages, mean_square, schedule, mesh=mesh, compile=compile)
    params = pipe.local([w.chunk(2)[own].clone() for w in whole])
    loss, grads = pipe.step(params, batch.chunk(2)[own])
    dist.all_reduce(loss, group=replicas)
    assert_same(loss / 2, value)
    for w, grad in zip(expected, grads, strict=True):
        if grad is not None:
            assert_same(grad / 2, w.chunk(2)[own])
    for program in pipe.programs(params, batch.chunk(2)[own]):
        assert str(program).count("UNSHARD %") == len(whole) // 2


@pytest.mark.parametrize(
    "compile", [False, pytest.param(True, marks=pytest.mark.inductor)], ids=["eager", "compiled"]
)
def test_parameters_are_gathered_once_a_step(crew: Crew, compile: bool) -> None:
    values(crew.run(gathered, compile))


def recorded_by_one(group: Group) -> list[Tensor]:
    """Steps of which one is recorded, on one rank of one row."""
    mesh = mesh_of((2, 2), ("tp", "pp"))
    part = mesh.get_group("tp")

    def stage(w: Tensor, x: Tensor) -> Tensor:
        return x + Leave.apply(Enter.apply(x, part) @ w, part)

    schedule = schedules.one_f_one_b(ranks=2, microbatches=4)
    pipe = fpipe.pipeline([stage] * 2, mean_square, schedule, mesh=mesh, compile=False)
    params = pipe.local([torch.eye(4)] * 2)
    losses = []
    for step in range(3):
        with fpipe.record() if (step, dist.get_rank()) == (1, 1) else nullcontext():
            losses.append(pipe.step(params, torch.ones(8, 4)).loss)
    return losses


def test_a_collective_is_not_repeated_where_one_row_records(crew: Crew) -> None:
    """The first rank had run ahead, and did so again to be recorded: its peer waited for ever."""
    for losses in values(crew.run(recorded_by_one)):
        assert [loss.item() for loss in losses] == [81.0] * 3


def given_as_pieces(group: Group) -> list[Any]:
    """What becomes of arguments that are spread over processes."""
    assert group is not None
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    stages = [lambda w, x: x @ w] * 2
    pipe = fpipe.pipeline(stages, mean_square, schedule, mesh=mesh, compile=False)
    matrix, batch = torch.eye(4), torch.ones(4, 4)
    spread = distribute_tensor(matrix, mesh, [Replicate()])
    rows = distribute_tensor(batch, mesh, [Shard(0)])
    return [
        attempt(pipe.step, pipe.local([spread, spread]), batch),
        attempt(pipe.step, pipe.local([matrix, matrix]), rows),
        attempt(pipe.step, pipe.local([matrix, matrix]), batch),
    ]


def test_distributed_tensors_are_refused_by_name(crew: Crew) -> None:
    """The batch was indexed for a sample of its numbers, which broke the connections."""
    for params, batch, plain in values(crew.run(given_as_pieces, ranks=[0, 1])):
        assert (
            "params of stage 0 is a DTensor over ('pp',): the dimension 'pp'" in params.error.text
        )
        assert "batch is a DTensor" in batch.error.text
        assert ".to_local()" in batch.error.text and ".full_tensor()" in batch.error.text
        assert plain.failure is None


def on_its_way(group: Group) -> Any:
    """A step on what a collective has not finished."""
    assert group is not None
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline([lambda w, x: x @ w] * 2, mean_square, schedule, group=group)
    matrix = collectives.all_reduce(torch.eye(4), "sum", group)
    batch = collectives.all_reduce(torch.ones(4, 4), "sum", group)
    return pipe.step(pipe.local([matrix, matrix]), batch).loss


def test_results_of_collectives_are_awaited(crew: Crew) -> None:
    """Compiled code read memory that such a tensor does not show."""
    for loss in values(crew.run(on_its_way, ranks=[0, 1])):
        assert loss == 64.0


def communicate_plainly(group: Group) -> Any:
    def stage(w: Tensor, x: Tensor) -> Tensor:
        y = x @ w
        dist.all_reduce(y, group=group)
        return y

    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline([stage] * 2, mean_square, schedule, group=group, compile=False)
    pipe.step(pipe.local([torch.eye(4)] * 2), torch.ones(4, 4))


def test_collectives_in_place_are_refused(crew: Crew) -> None:
    for outcome in crew.run(communicate_plainly, ranks=[0, 1]):
        assert "torch.distributed's own collectives" in outcome.error.text
