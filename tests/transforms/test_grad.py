"""Gradients by the batch, by the parameters, or by both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe
from fpipe import Stage, StageError, pytree, schedules
from tests.models import MODELS, Model, apply, assert_same, mlp, unpipelined


def by_batch(model: Model) -> Any:
    """The batch's gradient without a pipeline, None for integers."""
    leaves, spec = pytree.flatten(model.batch)
    tracked = [v.clone().requires_grad_() if v.is_floating_point() else v for v in leaves]
    batch = pytree.unflatten(spec, tracked)
    model.loss(apply(model.stages, model.params, batch), batch).backward()
    found = [
        None
        if not leaf.is_floating_point()
        else torch.zeros_like(leaf)
        if leaf.grad is None
        else leaf.grad
        for leaf in tracked
    ]
    return pytree.unflatten(spec, found)


def test_gradients_by_the_batch_equal_torch() -> None:
    """Microbatches of two sizes."""
    schedule = schedules.zbv(ranks=2, microbatches=3)
    model = mlp(4, 7)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, compile=False)
    expected = by_batch(model)
    loss, grads = fpipe.grad(pipe, "batch").step(model.params, model.batch)
    assert_same((loss, grads), (unpipelined(*model).loss, expected))
    both = fpipe.grad(pipe, ("params", "batch")).step(model.params, model.batch)
    assert_same(both.grads, (unpipelined(*model).grads, expected))
    (single,) = fpipe.grad(pipe, ("batch",)).step(model.params, model.batch).grads
    assert_same(single, expected)
    assert_same(tuple(fpipe.grad(pipe).step(model.params, model.batch)), tuple(unpipelined(*model)))


def shifted(p: Any, x: Tensor, batch: Any) -> Tensor:
    return torch.tanh(x @ p + batch["shift"] + batch["x"].T)


def entry(p: Any, x: Any, batch: Any) -> Tensor:
    return torch.tanh(x["x"].T @ p) * batch["x"].T


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("family", ["zb_h1", "one_f_one_b"])
def test_every_stage_that_reads_a_leaf_contributes(family: str, remat: str) -> None:
    """A leaf read by all stages and the loss, one that is not split, and one that nobody reads."""
    stages = [Stage(entry, reads_batch=True), *[Stage(shifted, reads_batch=True)] * 2]

    def loss(y: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(y, batch["x"].T * 2)

    params = [torch.randn(3, 3).double() for _ in stages]
    batch = {"x": torch.randn(3, 5), "shift": torch.randn(3), "unread": torch.randn(5)}
    batch = {name: leaf.double() for name, leaf in batch.items()} | {"ids": torch.arange(5)}
    pipe = fpipe.pipeline(
        stages,
        loss,
        schedules.get(family, ranks=3, microbatches=2),
        in_dims={"x": 1, "shift": None, "unread": 0, "ids": 0},
        remat=remat,
        compile=False,
    )

    model = Model(stages, loss, params, batch)  # type: ignore[arg-type]
    found = fpipe.grad(pipe, ("batch", "params")).step(params, batch)
    expected = by_batch(model)
    assert found.grads[0]["ids"] is None
    assert_same(found.grads, (expected, unpipelined(*model).grads))


def test_a_batch_of_integers_has_no_gradient() -> None:
    model = MODELS["gpt"](2, 4)
    pipe = fpipe.pipeline(
        model.stages, model.loss, schedules.zb_h1(ranks=2, microbatches=2), compile=False
    )
    found = fpipe.grad(pipe, "batch").step(model.params, model.batch)
    assert_same(found.loss, unpipelined(*model).loss)
    assert found.grads == {"tokens": None, "targets": None}


def test_gradients_by_the_batch_of_an_ensemble() -> None:
    model = mlp(4, 6)
    schedule = schedules.zbv(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, compile=False)
    batch = {"x": torch.stack([model.batch["x"], 2 * model.batch["x"]], -1), "y": model.batch["y"]}
    ensemble = fpipe.vmap(pipe, (None, {"x": -1, "y": None}))
    _, grads = fpipe.grad(ensemble, "batch").step(model.params, batch)
    own = [by_batch(model._replace(batch={**batch, "x": batch["x"][..., n]})) for n in range(2)]
    assert_same(grads["x"], torch.stack([g["x"] for g in own], -1))
    assert_same(grads["y"], own[0]["y"] + own[1]["y"])


def test_pipeline_of_a_module_stays_a_module_pipeline() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)).double()
    pipe = fpipe.from_module(
        module,
        schedule=schedules.zb_h1(ranks=2, microbatches=2),
        cuts=["0"],
        loss=lambda output, batch: output.square().mean(),
        compile=False,
    )
    params = {name: p.detach() for name, p in module.named_parameters()}
    x = torch.randn(4, 2).double()
    chosen = fpipe.grad(pipe, ("batch", "params"))
    (by_batch, by_params) = chosen.step(params, {"input": x}).grads
    expected = torch.func.grad(lambda x: module(x).square().mean())(x)
    assert_same(by_batch, {"input": expected})
    assert isinstance(chosen, fpipe.ModulePipeline) and chosen.cuts == ("0",)
    trained = {name: p - 0.1 * by_params[name] for name, p in params.items()}
    chosen.load_into(module, trained)
    assert_same({name: p.detach() for name, p in module.named_parameters()}, trained)


def test_programs_show_the_gradients_by_the_batch() -> None:
    model = mlp(2, 4)
    pipe = fpipe.pipeline(
        model.stages, model.loss, schedules.zb_h1(ranks=2, microbatches=2), compile=False
    )
    first, last = fpipe.grad(pipe, "batch").programs(model.params, model.batch)
    assert "gradient of microbatch 1 leaf 1 from stage 1" in str(first)
    assert not last.results.batch_grads


# ── refusals ────────────────────────────────────────────────────────────────────────────────────

MODEL = mlp(2, 4)
PIPE = fpipe.pipeline(
    MODEL.stages, MODEL.loss, schedules.one_f_one_b(ranks=2, microbatches=2), compile=False
)


@pytest.mark.parametrize("argnums", [0, (), ("params", "params"), "loss", ["batch"]])
def test_argnums_are_names(argnums: Any) -> None:
    with pytest.raises(StageError, match=r"argnums=.* must be 'params', 'batch' or a tuple"):
        fpipe.grad(PIPE, argnums)


def test_grad_refuses_vectors_rows_and_weighted_ensembles() -> None:
    with pytest.raises(StageError, match=r"is an int: fpipe\.grad takes a pipeline"):
        fpipe.grad(3)  # type: ignore[type-var]
    for other in (fpipe.hvp(PIPE), fpipe.per_example_grads(PIPE)):
        with pytest.raises(StageError, match="takes a vector or goes by rows is not defined"):
            fpipe.grad(other, "batch")
    chosen = fpipe.grad(PIPE, "batch")
    for transform in (fpipe.vmap, fpipe.ggnvp, fpipe.per_example_grads):
        with pytest.raises(StageError, match=rf"{transform.__name__} of a pipeline whose argnums"):
            transform(chosen)
