"""What plain autograd gives, beside a pipeline of stages and of one function with cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import fpipe
from fpipe import Pipeline, Step, pytree
from tests.models import assert_same

MICROBATCHES = 2

Stages = Sequence[Callable[[Any, Any], Any]]


def mean_of_squares(y: Tensor, _: Any = None) -> Tensor:
    """The loss of what the last stage returns, whatever the microbatch."""
    return y.square().mean()


def with_cuts(stages: Stages) -> Callable[[Any, Any], Tensor]:
    """The loss of stages one after the other, as one function."""

    def loss_fn(params: Any, batch: Any) -> Tensor:
        x = batch
        for number, (stage, own) in enumerate(zip(stages, params, strict=True)):
            x = stage(own, fpipe.cut(x) if number else x)
        return mean_of_squares(x)

    return loss_fn


def eager(
    loss_fn: Callable[[Any, Any], Tensor],
    params: Any,
    batch: Any,
    microbatches: int = MICROBATCHES,
) -> Step:
    """Loss and gradients of a function by plain autograd, each microbatch on leaves of its own."""
    leaves, spec = pytree.flatten(params)
    rows, batch_spec = pytree.flatten(batch)
    total = torch.zeros((), dtype=torch.float64)
    sums = [torch.zeros_like(leaf) for leaf in leaves]
    for part in zip(*(leaf.chunk(microbatches) for leaf in rows), strict=True):
        own = [leaf.clone().requires_grad_() for leaf in leaves]
        value = (
            loss_fn(pytree.unflatten(spec, own), pytree.unflatten(batch_spec, part)) / microbatches
        )
        value.backward()  # reentrant checkpoints know of no autograd.grad
        sums = [s if v.grad is None else s + v.grad for s, v in zip(sums, own, strict=True)]
        total = total + value.detach()
    return Step(total, pytree.unflatten(spec, sums))


def pipelines(
    stages: Stages, microbatches: int = MICROBATCHES, **options: Any
) -> Iterator[Pipeline]:
    """Of the stages, and of one function with cuts between them, with a rank for each."""
    schedule = fpipe.schedules.gpipe(ranks=len(stages), microbatches=microbatches)
    options = {"compile": False} | options
    yield fpipe.pipeline(stages, mean_of_squares, schedule, **options)
    yield fpipe.pipeline(with_cuts(stages), schedule=schedule, **options)


def check_stages(
    stages: Stages, params: Any, batch: Any, *, plainly: Stages | None = None, **options: Any
) -> None:
    """A step, in two schedules, and a value equal those of autograd.

    The stages keep what their backwards read, and the function with cuts computes it again.

    Args:
        stages: of the pipelines.
        params: of each.
        batch: of two microbatches.
        plainly: the same in terms that autograd alone takes.
        options: of the pipelines.
    """
    expected = eager(with_cuts(plainly or stages), params, batch)
    zero_bubble = fpipe.schedules.zb_h1(ranks=len(stages), microbatches=MICROBATCHES)
    kept, _ = pipelines(stages, remat="none", **options)
    _, again = pipelines(stages, remat="full", **options)
    for pipe in (kept, again):
        for found in (pipe, pipe.with_schedule(zero_bubble)):
            assert_same(found.step(params, batch), expected)
        assert_same(pipe.value(params, batch), expected.loss)


def check_members(stages: Stages, params: Any, batch: Any) -> None:
    """What `fpipe.vmap` gives of several members is what autograd gives of each."""
    members = [pytree.tree_map(lambda leaf, n=n: (leaf * (n + 1)).cos(), params) for n in range(2)]
    stacked = pytree.tree_map(lambda *leaves: torch.stack(leaves), *members)
    steps = [eager(with_cuts(stages), own, batch) for own in members]
    expected = pytree.tree_map(lambda *leaves: torch.stack(leaves), *map(tuple, steps))
    for pipe in pipelines(stages):
        assert_same(tuple(fpipe.vmap(pipe).step(stacked, batch)), expected)


def check_rows(stages: Stages, params: Any, batch: Any) -> None:
    """What `fpipe.per_example_grads` gives is what autograd gives of each row."""
    steps = [eager(with_cuts(stages), params, row, 1).grads for row in batch.split(1)]
    expected = pytree.tree_map(lambda *leaves: torch.stack(leaves), *steps)
    for pipe in pipelines(stages):
        assert_same(fpipe.per_example_grads(pipe).step(params, batch).grads, expected)
