"""Losses, gradients and norms of single examples: each row runs as a batch of one.

Every schedule is in test_every_schedule.py, with a small model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe
from fpipe import Stage, StageError, pytree, schedules
from tests.models import Model, assert_same, conv, mlp, pipe_of, short_gpt, unpipelined
from tests.transforms.helpers import norms_of

ROWS = 5


def row(model: Model, number: int) -> Model:
    one = pytree.tree_map(lambda leaf: leaf[number : number + 1], model.batch)
    return model._replace(batch=one)


def pick(value: Any, number: int) -> Any:
    return pytree.tree_map(lambda leaf: leaf[number], value)


# The block of a GPT takes long to trace: one of them.
@pytest.mark.parametrize("model", [short_gpt(ROWS), conv(2, ROWS)], ids=["gpt", "conv"])
def test_each_example_is_a_batch_of_one(model: Model) -> None:
    """Microbatches of two sizes, whose weights are not in the result."""
    pipe = pipe_of(model, schedules.one_f_one_b(ranks=2, microbatches=2))
    by_rows = fpipe.per_example_grads(pipe)
    loss, grads = by_rows.step(model.params, model.batch)
    assert loss.shape == (ROWS,)
    for number in range(ROWS):
        alone = unpipelined(*row(model, number))
        assert_same(fpipe.Step(loss[number], pick(grads, number)), alone)
    assert_same(by_rows.value(model.params, model.batch), loss)
    pipe = pipe.with_schedule(schedules.one_f_one_b(ranks=2, microbatches=1))
    norms = fpipe.per_example_norms(pipe).step(model.params, model.batch)
    assert_same(tuple(norms), norms_of((loss, grads)))


def test_forward_stacks_the_outputs_of_batches_of_one() -> None:
    model = conv(4, 5)
    pipe = pipe_of(model, schedules.zbv(ranks=2, microbatches=2))
    y = fpipe.per_example_grads(pipe).forward(model.params, model.batch)
    assert_same(
        pytree.tree_map(lambda leaf: leaf[:, 0], y), pipe.forward(model.params, model.batch)
    )


def test_rows_lie_along_any_dimension() -> None:
    """Integer parameters, parameters that nothing reads, a stage that reads the batch."""

    def first(p: Any, batch: Any) -> Tensor:
        return batch["x"].T[:, p["order"]] @ p["w"]

    def second(p: Any, x: Tensor, batch: Any) -> Tensor:
        return x * p["w"] * batch["scale"]

    def loss(y: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(y, batch["y"])

    pipe = fpipe.pipeline(
        [first, Stage(second, reads_batch=True)],
        loss,
        schedules.zb_h1(ranks=2, microbatches=2),
        in_dims={"x": -1, "y": 0, "scale": None},
        compile=False,
    )
    params = [
        {"w": torch.randn(3, 2).double(), "order": torch.tensor([2, 0, 1])},
        {"w": torch.randn(2).double(), "unused": torch.randn(4).double()},
    ]
    batch = {"x": torch.randn(3, 5), "y": torch.randn(5, 2), "scale": torch.randn(2)}
    batch = {name: leaf.double() for name, leaf in batch.items()}
    found, grads = fpipe.per_example_grads(pipe).step(params, batch)
    assert grads[0]["order"] is None
    assert_same(grads[1]["unused"], torch.zeros(5, 4).double())
    pipe = pipe.with_schedule(schedules.zb_h1(ranks=2, microbatches=1))
    for number in range(5):
        one = {"x": batch["x"][:, number, None], "y": batch["y"][number, None]}
        alone = pipe.step(params, {**one, "scale": batch["scale"]})
        assert_same(fpipe.Step(found[number], pick(grads, number)), alone)


def test_rows_of_ensembles_in_either_order() -> None:
    model = mlp(4, ROWS)
    pipe = pipe_of(model, schedules.zbv(ranks=2, microbatches=3))
    params = pytree.tree_map(lambda p: torch.stack([p, 1.1 * p], 1), model.params)
    inside = fpipe.per_example_grads(fpipe.vmap(pipe, (1, None))).step(params, model.batch)
    outside = fpipe.vmap(fpipe.per_example_grads(pipe), (1, None)).step(params, model.batch)
    norms = fpipe.per_example_norms(fpipe.vmap(pipe, (1, None))).step(params, model.batch)
    assert inside.loss.shape == norms.norms.shape == (ROWS, 2)
    assert_same(inside.loss, outside.loss.T)
    for number in range(2):
        own = pytree.tree_map(lambda p, n=number: p[:, n], params)
        alone = fpipe.per_example_grads(pipe).step(own, model.batch)
        assert_same(pytree.tree_map(lambda g, n=number: g.select(2, n), inside.grads), alone.grads)
        # Members lie where the parameters have them; rows come before all of a member's own.
        assert_same(pytree.tree_map(lambda g, n=number: g[:, n], outside.grads), alone.grads)
        assert_same(norms.norms[:, number], norms_of(alone)[1])


def test_norms_are_zero_where_nothing_is_trained() -> None:
    model = mlp(2, ROWS)
    schedule = schedules.gpipe(ranks=2, microbatches=3)
    pipe = pipe_of(model, schedule, trainable=False)
    found = fpipe.per_example_norms(pipe).step(model.params, model.batch)
    assert_same(found.norms, torch.zeros(ROWS).double())
    assert_same(found.loss, fpipe.per_example_grads(pipe).value(model.params, model.batch))
    members = pytree.tree_map(lambda p: torch.stack([p, 1.1 * p]), model.params)
    several = fpipe.per_example_norms(fpipe.vmap(pipe)).step(members, model.batch)
    assert_same(several.norms, torch.zeros(ROWS, 2).double())


def test_rows_of_hessian_products_in_either_order() -> None:
    model = mlp(2, 3)
    pipe = pipe_of(model, schedules.zb_h1(ranks=2, microbatches=2))
    vector = pytree.tree_map(torch.ones_like, model.params)
    inside = fpipe.per_example_grads(fpipe.hvp(pipe)).step(model.params, model.batch, vector)
    outside = fpipe.hvp(fpipe.per_example_grads(pipe)).step(model.params, model.batch, vector)
    assert_same(tuple(inside), tuple(outside), 1e-9)
    single = fpipe.hvp(pipe.with_schedule(schedules.zb_h1(ranks=2, microbatches=1)))
    for number in range(3):
        alone = single.step(model.params, row(model, number).batch, vector)
        assert_same(pick(tuple(inside), number), tuple(alone), 1e-9)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda w: w.t().contiguous().t(),
    "strided": lambda w: torch.stack([w, w], -1).flatten(1)[:, ::2],
    "expanded": lambda w: w[:1].expand(w.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_products_along_strided_vectors(layout: str) -> None:
    """A direction was once copied into the memory that all rows of a parameter share."""

    def stage(w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ w)

    torch.manual_seed(0)
    x, plain, other = torch.randn(4, 3), torch.randn(3, 3), torch.randn(3, 3)
    laid = LAYOUTS[layout](plain)
    same = laid.clone(memory_format=torch.contiguous_format)
    schedule = schedules.zb_h1(ranks=2, microbatches=2)
    pipe = fpipe.pipeline([stage] * 2, lambda y, _: y.square().mean(), schedule, compile=False)
    # A value is the same of a product and of a derivative: each in one order.
    for both in (
        fpipe.jvp(fpipe.per_example_grads(pipe)),
        fpipe.per_example_grads(fpipe.hvp(pipe)),
    ):
        expected = both.value([same] * 2, x, [other] * 2)
        assert_same(both.value([laid] * 2, x, [other] * 2), expected)
        expected = both.value([other] * 2, x, [same] * 2)
        assert_same(both.value([other] * 2, x, [laid] * 2), expected)


def test_rows_keep_the_options_of_the_pipeline() -> None:
    model = mlp(4, 6)
    norms = fpipe.per_example_norms(
        pipe_of(model, schedules.interleaved_1f1b(ranks=2, microbatches=2))
    )
    other = norms.with_schedule(schedules.zbv(ranks=2, microbatches=3))
    assert_same(
        tuple(other.step(model.params, model.batch)), tuple(norms.step(model.params, model.batch))
    )
    assert_same(other.value(model.params, model.batch), norms.step(model.params, model.batch).loss)
    assert "for microbatch 1" in str(other.programs(model.params, model.batch)[0])
    assert other.local(model.params) is model.params


# ── refusals ────────────────────────────────────────────────────────────────────────────────────

PIPE = pipe_of(mlp(2, 4), schedules.one_f_one_b(ranks=2, microbatches=2))


@pytest.mark.parametrize("transform", [fpipe.per_example_grads, fpipe.per_example_norms])
def test_refuses_states_and_rows_of_rows(transform: Any) -> None:
    name = transform.__name__
    with pytest.raises(StageError, match=rf"is an int: fpipe\.{name} takes a pipeline"):
        transform(3)
    with pytest.raises(StageError, match=rf"fpipe\.{name} of a pipeline that goes by rows already"):
        transform(fpipe.per_example_grads(PIPE))
    with pytest.raises(StageError, match="randomness='all' must be one of"):
        transform(PIPE, randomness="all")


def test_norms_compose_in_one_order_only() -> None:
    with pytest.raises(StageError, match=r"as in fpipe\.per_example_norms\(fpipe\.vmap\(pipe\)\)"):
        fpipe.vmap(fpipe.per_example_norms(PIPE))
    with pytest.raises(StageError, match="would mix the norms of two products"):
        fpipe.per_example_norms(fpipe.hvp(PIPE))  # type: ignore[arg-type]
    with pytest.raises(StageError, match=r"fpipe\.hvp of a pipeline that returns norms"):
        fpipe.hvp(fpipe.per_example_norms(PIPE))  # type: ignore[arg-type]
