"""What the ranks do with transformed pipelines; called as ``function(group, *arguments)``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import fpipe
from fpipe import Schedule, tree
from tests.cut_model import make_network, network
from tests.distributed.crew import attempt
from tests.models import conv, gpt, mlp


def run(group: dist.ProcessGroup | None, transform: str, schedule: Schedule) -> Any:
    """The result of a transformed step, on every rank; in one process without a group."""
    make = {"vmap": gpt, "grad": conv}[transform]
    model = make(schedule.num_stages, 5)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, group=group, compile=False)
    params = pipe.local(model.params)
    if transform == "vmap":
        members = tree.tree_map(lambda p: torch.stack([p, 1.1 * p], -1), params)
        return fpipe.vmap(pipe, (-1, None)).step(members, model.batch)
    batch = {**model.batch, "pixels": model.batch["pixels"].double() / 255}
    return fpipe.grad(pipe, ("batch", "params")).step(params, batch)


def run_cut(group: dist.ProcessGroup | None, transform: str, schedule: Schedule) -> Any:
    """The result of a transformed step of one function, on every rank."""
    pipe = fpipe.pipeline(network, schedule=schedule, compile=False, group=group)
    params, batch = make_network()
    members = tree.tree_map(lambda p: torch.stack([p, 0.9 * p]), params)
    match transform:
        case "vmap":
            return fpipe.vmap(pipe).step(members, batch)
        case "hvp":
            return fpipe.hvp(pipe).step(params, batch, params)
        case "rows of vmap":
            return fpipe.per_example_grads(fpipe.vmap(pipe)).step(members, batch)
        case "norms":
            return fpipe.per_example_norms(pipe).step(params, batch)
        case "grad":
            loss, (by_batch, by_params) = fpipe.grad(pipe, ("batch", "params")).step(params, batch)
            return loss, by_params, None if by_batch is None else by_batch["x"]
    raise AssertionError(transform)


def make_ensemble(group: dist.ProcessGroup | None, schedule: Schedule) -> Any:
    """The parameters that each rank makes for all members, and a step with them."""
    pipe = fpipe.vmap(fpipe.pipeline(network, schedule=schedule, compile=False, group=group))
    params, batch = make_network()
    shapes = tree.tree_map(lambda p: torch.empty(2, *p.shape, dtype=p.dtype, device="meta"), params)

    def normal(key: torch.Tensor, name: str, like: torch.Tensor) -> torch.Tensor:
        return fpipe.random.normal(key, like.shape, like.dtype)

    made = pipe.init(normal, fpipe.random.key(0), batch, shapes=shapes)
    return made, pipe.step(made, batch)


def wrong_vector(group: dist.ProcessGroup) -> list[Any]:
    """What comes of a vector that is wrong on rank 1, and of a right one afterwards."""
    model = mlp(2, 4)
    schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.hvp(fpipe.pipeline(model.stages, model.loss, schedule, group=group, compile=False))
    params = pipe.local(model.params)
    wrong = tree.tree_map(lambda p: p[:1], params) if group.rank() == 1 else params
    return [attempt(pipe.step, params, model.batch, vector) for vector in (wrong, params)]
