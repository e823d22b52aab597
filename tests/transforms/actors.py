"""Calls of transformed pipelines for each rank to make: ``function(group, *arguments)``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import grad, grad_and_value, jvp

import fpipe
from fpipe import Schedule, pytree, schedules
from tests.cut_model import make_network, network
from tests.distributed.crew import attempt
from tests.models import conv, mlp, short_gpt


def run(group: dist.ProcessGroup | None, transform: str, schedule: Schedule) -> Any:
    """The result of a transformed step, on every rank; in one process without a group."""
    model = short_gpt(6) if transform == "vmap" else conv(schedule.num_stages, 6)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, group=group, compile=False)
    params = pipe.local(model.params)
    if transform == "vmap":
        members = pytree.tree_map(lambda p: torch.stack([p, 1.1 * p], -1), params)
        return fpipe.vmap(pipe, (-1, None)).step(members, model.batch)
    batch = {**model.batch, "pixels": model.batch["pixels"].double() / 255}
    return fpipe.grad(pipe, ("batch", "params")).step(params, batch)


def shorter(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Two stages, each of which reads both matrices and the inputs."""
    h = fpipe.cut(torch.tanh(batch["x"] @ params["a"] @ params["b"]))
    return ((h @ params["b"] + batch["x"]) @ params["a"] - batch["y"]).square().mean()


def members_on_one_rank(group: dist.ProcessGroup | None) -> fpipe.Step:
    """An ensemble whose last stage has no parameters, on a rank that has nothing stacked."""
    stages = [lambda w, x: torch.tanh(x * w), lambda _, x: x * x]
    schedule = schedules.gpipe(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False, group=group)
    members = fpipe.vmap(pipe, axis_size=3)
    params = [torch.arange(3.0, dtype=torch.float64), None]
    batch = torch.linspace(-1, 1, 4, dtype=torch.float64)
    return members.step(pipe.local(params), batch if pipe.rank in (None, 0) else None)


CUT: dict[str, Callable[[Any], Any]] = {
    "vmap": fpipe.vmap,
    "hvp": fpipe.hvp,
    "rows of vmap": lambda pipe: fpipe.per_example_grads(fpipe.vmap(pipe)),
    "norms": fpipe.per_example_norms,
    "grad": lambda pipe: fpipe.grad(pipe, ("batch", "params")),
}


def families_of(transform: str) -> list[str]:
    """Those of two stages on two ranks, and those of four, for transforms in turns."""
    stages = 2 if list(CUT).index(transform) % 2 else 4
    return [
        name
        for name, family in schedules.FAMILIES.items()
        if family(ranks=2, microbatches=3).num_stages == stages
    ]


def run_cut(group: dist.ProcessGroup | None, transform: str) -> list[Any]:
    """The results of a transformed step of one function, on schedules of so many stages."""
    params, batch = make_network()
    own = pytree.tree_map(lambda p: torch.stack([p, 0.9 * p]), params)
    if "vmap" not in transform:
        own = params
    made = {
        2: schedules.gpipe(ranks=2, microbatches=3),
        4: schedules.looped_bfs(ranks=2, microbatches=3),
    }
    pipes = {
        stages: CUT[transform](
            fpipe.pipeline(
                shorter if stages == 2 else network, schedule=base, compile=False, group=group
            )
        )
        for stages, base in made.items()
    }
    results: list[Any] = []
    for family in families_of(transform):
        schedule = schedules.get(family, ranks=2, microbatches=3)
        pipe = pipes[schedule.num_stages].with_schedule(schedule)
        found = pipe.step(own, batch, *[params] * (transform == "hvp"))
        if transform == "grad":
            loss, (by_batch, by_params) = found
            found = loss, by_params, None if by_batch is None else by_batch["x"]
        results.append(tuple(found))
    return results


def slopes(value: Callable[..., Tensor], a: Tensor, x: Tensor) -> Tensor:
    return grad(value)(a, x).square().sum()


def loss_beside(value: Callable[..., Tensor], a: Tensor, x: Tensor) -> Tensor:
    loss: Tensor = grad_and_value(value)(a, x)[1]
    return loss


def differentiate(group: dist.ProcessGroup) -> tuple[Any, list[str]]:
    """The gradient by one matrix, after what is refused over processes: what was said of it."""
    params, batch = make_network()
    schedule = schedules.gpipe(ranks=2, microbatches=3)
    pipe = fpipe.pipeline(shorter, schedule=schedule, compile=False, group=group)

    def value(a: Tensor, x: Tensor) -> Tensor:
        found: Tensor = pipe.value({**params, "a": a}, {**batch, "x": x})
        return found

    a, x = params["a"], batch["x"]
    first = grad(value)(a, x)  # what it makes for itself must belong to no level
    refused = [
        attempt(grad(partial(slopes, value)), a, x),
        attempt(grad(partial(loss_beside, value, a)), x),
        attempt(jvp, value, (a, x), (a, x)),
    ]
    return first, [outcome.error.text for outcome in refused]


def make_ensemble(group: dist.ProcessGroup | None, schedule: Schedule) -> Any:
    """The parameters that each rank makes for all members, and a step with them."""
    pipe = fpipe.vmap(fpipe.pipeline(network, schedule=schedule, compile=False, group=group))
    params, batch = make_network()
    shapes = pytree.tree_map(
        lambda p: torch.empty(2, *p.shape, dtype=p.dtype, device="meta"), params
    )

    def normal(key: torch.Tensor, name: str, like: torch.Tensor) -> torch.Tensor:
        return fpipe.random.normal(key, like.shape, like.dtype)

    made = pipe.init(normal, fpipe.random.key(0), batch, shapes=shapes)
    return made, pipe.step(made, batch)


def wrong_vector(group: dist.ProcessGroup) -> list[Any]:
    """The errors of a vector that is wrong on rank 1, and the results of a right one afterwards."""
    model = mlp(2, 4)
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.hvp(fpipe.pipeline(model.stages, model.loss, schedule, group=group, compile=False))
    params = pipe.local(model.params)
    short = pytree.tree_map(lambda p: p[:1], params)
    vectors = [wrong if group.rank() == 1 else params for wrong in (short, None)]
    calls = [(pipe.step, vectors[0]), *((call, vectors[1]) for call in (pipe.step, pipe.value))]
    return [
        attempt(call, params, model.batch, vector) for call, vector in (*calls, (pipe.step, params))
    ]


def norm_of_product(group: dist.ProcessGroup | None) -> Tensor:
    """The norm of a product with the Hessian, by the pipeline that made it."""
    model = mlp(2, 4)
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.hvp(fpipe.pipeline(model.stages, model.loss, schedule, group=group, compile=False))
    params = pipe.local(model.params)
    return fpipe.global_norm(pipe.step(params, model.batch, params).hvp, pipe=pipe)


def outputs_by_row(group: dist.ProcessGroup | None) -> list[Any]:
    """The output of the last stage for each row, of one model and of two members."""
    model = mlp(2, 5)
    schedule = schedules.zb_h1(ranks=2, microbatches=3)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, group=group, compile=False)
    params = pipe.local(model.params)
    members = pytree.tree_map(lambda p: torch.stack([p, 0.9 * p]), params)
    return [
        fpipe.per_example_grads(pipe).forward(params, model.batch),
        fpipe.per_example_grads(fpipe.vmap(pipe)).forward(members, model.batch),
        fpipe.vmap(fpipe.per_example_grads(pipe)).forward(members, model.batch),
    ]


def freeze(group: dist.ProcessGroup | None) -> list[tuple[bool, Tensor, Any]]:
    """Values of a model whose last stage alone requires a gradient, with the weight's.

    Another pipeline that is made between them has a value without any.
    """
    model = mlp(2, 5)
    params = [model.params[0], pytree.tree_map(lambda p: p.requires_grad_(), model.params[1])]
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    found: list[tuple[bool, Tensor, Any]] = []
    for frozen in (False, False, True):
        if not found or frozen:
            pipe = fpipe.pipeline(model.stages, model.loss, schedule, group=group, compile=False)
        for _ in range(2):  # the second runs ahead of the others' headers
            with torch.set_grad_enabled(not frozen):
                loss = pipe.value(pipe.local(params), model.batch)
            if loss.requires_grad:
                (grad,) = torch.autograd.grad(loss, params[1]["w"])
            found.append((loss.requires_grad, loss.detach(), grad if loss.requires_grad else None))
    return found


def unknown_derivatives(group: dist.ProcessGroup) -> list[Any]:
    """The errors of derivatives that rank 0 alone asks for, and results of another pipeline."""
    model = conv(2, 4)
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    batch = {**model.batch, "pixels": model.batch["pixels"].double() / 255}
    asks = group.rank() == 0
    own = {**batch, "pixels": batch["pixels"].clone().requires_grad_(asks)}

    def make() -> fpipe.Pipeline:
        return fpipe.pipeline(model.stages, model.loss, schedule, group=group, compile=False)

    pipe = make()
    params = pipe.local(model.params)
    tracked = pytree.tree_map(lambda p: p.clone().requires_grad_(asks), params)
    by_batch, by_both = fpipe.grad(pipe, "batch"), fpipe.grad(pipe, ("batch", "params"))

    def slopes() -> Tensor | None:
        loss = by_both.value(tracked, batch)
        if not asks:
            return None
        return torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, pytree.flatten(tracked)[0])]
        )

    def directly() -> Tensor | None:
        grads = make().step(params, batch).grads
        return torch.cat([g.flatten() for g in pytree.flatten(grads)[0]]) if asks else None

    def pulled(pipe: fpipe.Pipeline, params: Any, batch: Any) -> Tensor:
        loss = pipe.value(params, batch)
        assert loss.requires_grad == asks
        if asks:
            loss.backward()
        return loss

    return [
        attempt(pulled, pipe, params, own),
        attempt(pulled, by_batch, tracked, batch),
        attempt(slopes),
        attempt(directly),
    ]
