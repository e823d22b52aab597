"""Every transform of a small model: how it is made and called, and what torch.func gives instead.

A transformed pipeline is made once for each number of stages and moved from schedule to schedule,
so it is traced, and compiled, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import grad, grad_and_value, jvp, vjp, vmap

import fpipe
from fpipe import Schedule, pytree, schedules
from fpipe.functional.dual import load_rules
from tests.models import Model, apply, assert_same, mean_square, mlp
from tests.transforms.helpers import norms_of, tracked

ROWS, MICROBATCHES = 6, 3
BASES = {
    2: schedules.gpipe(ranks=2, microbatches=MICROBATCHES),
    4: schedules.looped_bfs(ranks=2, microbatches=MICROBATCHES),
}


class Given(NamedTuple):
    """Arguments of the calls; over a process group without the parts of other ranks."""

    params: Any
    members: Any
    vector: Any
    batch: Any
    batch_vector: Any


class Transform(NamedTuple):
    """A transform.

    Attributes:
        make: takes a pipeline and gives another.
        call: the other with its arguments; a tuple whose lists have one part per stage, and whose
            dictionaries are gradients by the batch.
        plain: the same of the unpipelined model, by torch.func.
    """

    make: Callable[[Any], Any]
    call: Callable[[Any, Given], Sequence[Any]]
    plain: Callable[[Model, Given], Sequence[Any]]


def given(model: Model) -> Given:
    members = pytree.tree_map(lambda p: torch.stack([p, 1.1 * p]), model.params)
    vector = pytree.tree_map(torch.cos, model.params)
    return Given(
        model.params, members, vector, model.batch, pytree.tree_map(torch.sin, model.batch)
    )


# ── without a pipeline ──────────────────────────────────────────────────────────────────────────


def whole(model: Model) -> Callable[[Any, Any], Tensor]:
    return lambda params, batch: model.loss(apply(model.stages, params, batch), batch)


def step(model: Model) -> Callable[[Any, Any], tuple[Tensor, Any]]:
    def run(params: Any, batch: Any) -> tuple[Tensor, Any]:
        grads, loss = grad_and_value(whole(model))(params, batch)
        return loss, grads

    return run


def members_of(model: Model) -> Callable[[Any, Any], Any]:
    return vmap(step(model), (0, None))


def by_row(function: Callable[[Any, Any], Any], params: Any, batch: Any) -> Any:
    """Each row is a batch of one."""
    rows = pytree.tree_map(lambda leaf: leaf[:, None], batch)
    return vmap(function, (None, 0))(params, rows)


def product(model: Model) -> Callable[[Any, Any, Any], Any]:
    def run(params: Any, batch: Any, vector: Any) -> Any:
        pushed: Any = jvp(lambda own: step(model)(own, batch), (params,), (vector,))
        (loss, grads), (_, found) = pushed
        return loss, grads, found

    return run


def gauss_newton(model: Model, args: Given) -> Any:
    def output(params: Any) -> Tensor:
        y: Tensor = apply(model.stages, params, args.batch)
        return y

    def of_output(y: Tensor) -> Tensor:
        return model.loss(y, args.batch)

    pushed: Any = jvp(output, (args.params,), (args.vector,))
    bent: Any = jvp(grad(of_output), pushed[:1], pushed[1:])
    (found,) = vjp(output, args.params)[1](bent[1])
    return *step(model)(args.params, args.batch), found


def by_batch_and_params(model: Model, args: Given) -> Any:
    by_params, by_batch = grad(whole(model), (0, 1))(args.params, args.batch)
    return whole(model)(args.params, args.batch), by_batch, by_params


def by_both(model: Model, args: Given) -> Any:
    pushed: Any = jvp(
        grad_and_value(whole(model), (1, 0)),
        (args.params, args.batch),
        (args.vector, args.batch_vector),
    )
    (grads, loss), (products, _) = pushed
    return loss, *grads, *products


def through_a_step(value: Callable[[Any, Any], Tensor], args: Given) -> Any:
    """The gradient of the loss after a step, by the parameters before it and by its batch."""

    def after(params: Any, batch: Any) -> Tensor:
        grads = grad(value)(params, batch)
        return value(pytree.tree_map(lambda p, g: p - 0.1 * g, params, grads), args.batch)

    by_params, by_batch = grad(after, (0, 1))(args.params, args.batch_vector)
    return by_params, by_batch


def doubled(model: Model, args: Given) -> Any:
    loss, grads = step(model)(args.params, args.batch)
    return loss, pytree.tree_map(lambda g: 2 * g, grads)


# ── through a pipeline ──────────────────────────────────────────────────────────────────────────


def chosen(pipe: Any, args: Given) -> Any:
    loss, (by_batch, by_params) = pipe.step(args.params, args.batch)
    return loss, by_batch, by_params


def value_and_backward(pipe: Any, args: Given) -> Any:
    params = tracked(args.params)
    loss = pipe.value(params, args.batch)
    (2 * loss).backward()
    return loss.detach(), pytree.tree_map(lambda p: p.grad, params)


def along_both(pipe: Any, args: Given) -> Any:
    loss, *sides = pipe.step(args.params, args.batch, (args.batch_vector, args.vector))
    return loss, *(own for side in sides for own in side)


def of_params(pipe: Any, args: Given) -> Any:
    return pipe.step(args.params, args.batch)


def of_members(pipe: Any, args: Given) -> Any:
    return pipe.step(args.members, args.batch)


def along(pipe: Any, args: Given) -> Any:
    return pipe.step(args.params, args.batch, args.vector)


TRANSFORMS: dict[str, Transform] = {
    "vmap": Transform(
        fpipe.vmap,
        of_members,
        lambda model, args: members_of(model)(args.members, args.batch),
    ),
    "per_example_grads": Transform(
        fpipe.per_example_grads,
        of_params,
        lambda model, args: by_row(step(model), args.params, args.batch),
    ),
    "per_example_norms": Transform(
        fpipe.per_example_norms,
        of_params,
        lambda model, args: norms_of(by_row(step(model), args.params, args.batch)),
    ),
    "per_example_grads of vmap": Transform(
        lambda pipe: fpipe.per_example_grads(fpipe.vmap(pipe)),
        of_members,
        lambda model, args: by_row(members_of(model), args.members, args.batch),
    ),
    "per_example_norms of vmap": Transform(
        lambda pipe: fpipe.per_example_norms(fpipe.vmap(pipe)),
        of_members,
        lambda model, args: norms_of(by_row(members_of(model), args.members, args.batch)),
    ),
    "jvp": Transform(
        fpipe.jvp,
        lambda pipe, args: pipe.value(args.params, args.batch, args.vector),
        lambda model, args: jvp(
            lambda own: whole(model)(own, args.batch), (args.params,), (args.vector,)
        ),
    ),
    "hvp": Transform(
        fpipe.hvp,
        along,
        lambda model, args: product(model)(args.params, args.batch, args.vector),
    ),
    "hvp by both": Transform(
        lambda pipe: fpipe.hvp(fpipe.grad(pipe, ("batch", "params"))), along_both, by_both
    ),
    "ggnvp": Transform(fpipe.ggnvp, along, gauss_newton),
    "vmap of hvp": Transform(
        lambda pipe: fpipe.vmap(fpipe.hvp(pipe), (0, None, None)),
        lambda pipe, args: pipe.step(args.members, args.batch, args.vector),
        lambda model, args: vmap(product(model), (0, None, None))(
            args.members, args.batch, args.vector
        ),
    ),
    "grad": Transform(
        lambda pipe: fpipe.grad(pipe, ("batch", "params")), chosen, by_batch_and_params
    ),
    "value with history": Transform(lambda pipe: pipe, value_and_backward, doubled),
    "torch.func.grad twice": Transform(
        lambda pipe: pipe,
        lambda pipe, args: through_a_step(pipe.value, args),
        lambda model, args: through_a_step(whole(model), args),
    ),
    "torch.func.vmap": Transform(
        lambda pipe: pipe,
        lambda pipe, args: vmap(pipe.step, (0, None))(args.members, args.batch),
        lambda model, args: members_of(model)(args.members, args.batch),
    ),
}


# ── a pipeline made once ────────────────────────────────────────────────────────────────────────


def bare_first(p: Tensor, batch: Any) -> Tensor:
    return torch.tanh(batch["x"] @ p)


def bare_layer(p: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ p)


def bare(num_stages: int, rows: int) -> Model:
    """The model with the fewest kernels: gradients of its parameters are products alone."""
    model = mlp(num_stages, rows)
    stages = [bare_first, *[bare_layer] * (num_stages - 1)]
    return Model(stages, mean_square, [own["w"] for own in model.params], model.batch)


@cache
def made(
    name: str, make: Callable[[int, int], Model], num_stages: int, compile: bool, group: Any
) -> tuple[Any, Given]:
    """The transform of the pipeline of a model, and what it is called with."""
    load_rules()  # torch warns of its own code when it loads them
    model = make(num_stages, ROWS)
    base = fpipe.pipeline(model.stages, model.loss, BASES[num_stages], compile=compile, group=group)
    pipe, args = TRANSFORMS[name].make(base), given(model)
    if pipe is base:
        called(name, pipe, args)  # it keeps the pipelines that such calls need
    return pipe, args


def called(name: str, pipe: Any, args: Given) -> tuple[Any, ...]:
    params, members, vector, batch, batch_vector = args
    own = Given(pipe.local(params), pipe.local(members), pipe.local(vector), batch, batch_vector)
    return tuple(TRANSFORMS[name].call(pipe, own))


def run(
    group: dist.ProcessGroup | None,
    name: str,
    schedule: Schedule,
    make: Callable[[int, int], Model] = mlp,
    compile: bool = False,
) -> tuple[Any, ...]:
    """The results of a transform on a schedule; in one process without a group."""
    pipe, args = made(name, make, schedule.num_stages, compile, group)
    return called(name, pipe.with_schedule(schedule), args)


@cache
def expected(name: str, make: Callable[[int, int], Model], num_stages: int) -> tuple[Any, ...]:
    """The results of torch.func on the unpipelined model."""
    load_rules()
    model = make(num_stages, ROWS)
    return tuple(TRANSFORMS[name].plain(model, given(model)))


def check_transform(name: str, schedule: Schedule, *options: Any) -> None:
    """A transform on a schedule gives what torch.func gives."""
    make = options[0] if options else mlp
    found = run(None, name, schedule, *options)
    assert_same(found, expected(name, make, schedule.num_stages), 1e-9)
