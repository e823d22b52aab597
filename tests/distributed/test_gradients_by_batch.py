"""Gradients by the batch over processes: the rank of the first stage has them, or is told so."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
from fpipe import schedules
from tests.distributed.crew import Crew, Outcome, attempt, values
from tests.models import assert_identical, rand

SCHEDULE = schedules.one_f_one_b(ranks=2, microbatches=2)


def encode(weight: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return torch.tanh(batch["x"] @ weight)


def decode(weight: Tensor, hidden: Tensor) -> Tensor:
    return hidden @ weight


def loss(y: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (y - batch["y"]).square().mean()


def by_batch(group: dist.ProcessGroup | None) -> Any:
    """Over processes each has what it reads alone; nobody reads ``z``."""
    params, batch = [rand(3, 3), rand(3, 3)], {name: rand(4, 3) for name in "xyz"}
    if group is not None:
        own = "x" if group.rank() == 0 else "y"
        batch = {name: leaf if name == own else leaf.to("meta") for name, leaf in batch.items()}
    pipe = fpipe.pipeline([encode, decode], loss, SCHEDULE, compile=False, group=group)
    return fpipe.grad(pipe, "batch").step(pipe.local(params), batch).grads


def test_leaf_that_another_rank_reads_has_its_gradient(crew: Crew) -> None:
    """The first rank has it on the meta device, and its gradient went there too."""
    first, last = values(crew.run(by_batch, ranks=range(2)))
    expected = by_batch(None)
    assert last is None and first["z"] is None and not expected["z"].any()
    assert_identical([first["x"], first["y"]], [expected["x"], expected["y"]])


def scaled(params: dict[str, Tensor], batch: Tensor) -> Tensor:
    """The first stage reads nothing of the batch."""
    first = fpipe.cut(torch.tanh(params["a"]).sum())
    return (first * params["b"] * batch).square().mean()


def without_batch(group: dist.ProcessGroup) -> list[Outcome]:
    params, batch = {"a": rand(3), "b": rand(3)}, rand(4, 3)
    pipe = fpipe.pipeline(scaled, schedule=SCHEDULE, compile=False, group=group)
    by = fpipe.grad(pipe, "batch")
    own = batch if group.rank() else None
    return [
        attempt(lambda: by.step(params, own)),
        attempt(lambda: by.step(params, batch if group.rank() else batch.to("meta")).grads),
        attempt(lambda: pipe.step(params, own).loss),
    ]


def test_first_rank_without_a_batch_is_told_that_it_gets_the_gradients(crew: Crew) -> None:
    """No rank got them, without a word."""
    first, last = values(crew.run(without_batch, ranks=range(2)))
    for wrong, *_ in (first, last):
        assert wrong.error.rank == 0
        assert "batch=None on the rank of the first stage, which gets the gradients" in (
            wrong.error.text
        )
    params, batch = {"a": rand(3), "b": rand(3)}, rand(4, 3)
    plain = torch.func.grad(scaled, argnums=1)(params, batch)
    torch.testing.assert_close(first[1].value, plain)
    assert last[1].value is None
    assert_identical(first[2].value, last[2].value)
