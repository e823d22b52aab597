"""Data parallelism beside a pipeline, as docs/distributed.md shows it, against one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fpipe
from fpipe import Pipeline, pytree, schedules
from tests.cut_model import make_network, network
from tests.distributed.actors import Group
from tests.distributed.crew import Crew, mesh_of, values
from tests.models import assert_identical, assert_same, mlp

SHAPES: list[dict[str, int]] = [
    {"pp": 2, "dp": 2},
    {"tp": 1, "dp": 2, "cp": 1, "pp": 2},
]


def masked(y: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """The squares of the rows that count, and how many count."""
    counts = batch["y"][:, 0] > 0
    return ((y - batch["y"]).square().sum(1) * counts).sum(), counts.sum()


def pipelines(mesh: DeviceMesh | None) -> list[tuple[Pipeline, Any, Any]]:
    """Pipelines with their parameters and batches: a mean, a weighted mean, shared parameters."""
    model = mlp(2, 9)
    zero_bubble = schedules.zb_h1(ranks=2, microbatches=2)
    looped = schedules.interleaved_1f1b(ranks=2, microbatches=2)
    chain, function = (model.params, model.batch), make_network()
    common: dict[str, Any] = {"mesh": mesh, "compile": False}
    return [
        (fpipe.pipeline(model.stages, model.loss, zero_bubble, **common), *chain),
        (
            fpipe.pipeline(model.stages, masked, zero_bubble, reduction="weighted", **common),
            *chain,
        ),
        (fpipe.pipeline(network, schedule=looped, **common), *function),
    ]


def replica_of(batch: Any, mesh: DeviceMesh) -> Any:
    """The rows of this replica; the first has more of nine than the second."""
    place, count = mesh.get_local_rank("dp"), mesh["dp"].size()
    return {name: leaf.tensor_split(count)[place] for name, leaf in batch.items()}


def weight_of(batch: Any, pipe: Pipeline) -> Tensor:
    """What the mean is over: rows, or those that count."""
    if pipe._engine.definition.reduction == "weighted":
        return masked(batch["y"], batch)[1].double()
    leaf: Tensor = next(iter(batch.values()))
    return torch.tensor(float(len(leaf)), dtype=torch.float64)


def train_on_mesh(group: Group, shape: dict[str, int]) -> list[Tensor]:
    """Losses and norms of clipped steps, the pipelines taking turns.

    Between the steps the caller sends something over the groups that the pipelines use.
    """
    mesh = None
    if group is not None:
        mesh = mesh_of((*shape.values(),), (*shape,))
    made = pipelines(mesh)
    trained = [pipe.local(params) for pipe, params, _ in made]
    numbers: list[Tensor] = []
    for _ in range(3):
        for index, (pipe, _, batch) in enumerate(made):
            own = batch if mesh is None else replica_of(batch, mesh)
            loss, grads = pipe.step(trained[index], own)
            if mesh is not None:
                weight = weight_of(own, pipe)
                total = weight.clone()
                dist.all_reduce(total, group=mesh.get_group("dp"))
                for leaf in pytree.flatten((loss, grads))[0]:
                    dist.all_reduce(leaf.mul_(weight / total), group=mesh.get_group("dp"))
                dist.all_reduce(torch.ones(3), group=mesh.get_group("pp"))
                dist.all_reduce(torch.ones(3))
            grads, norm = fpipe.clip_by_global_norm(grads, 0.1, pipe=pipe)
            trained[index] = optree.tree_map(
                lambda p, g: p if g is None else p - g, trained[index], grads, none_is_leaf=True
            )
            numbers += [loss, norm]
    return numbers


@cache
def in_one_process() -> list[Tensor]:
    return train_on_mesh(None, {})


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(shape))
def test_replicas_train_as_one_process_does_on_all_rows(crew: Crew, shape: dict[str, int]) -> None:
    expected = in_one_process()
    parts = values(crew.run(train_on_mesh, shape))
    for part in parts:
        assert_same(part, expected)
        assert_identical(part, parts[0])
    assert len({norm.item() for norm in expected[1::2]}) == len(expected) // 2
