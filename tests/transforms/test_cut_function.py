"""Transforms of one function that is cut: what torch.func gives of the function itself.

The model has a skip value, a table that the first stage and the last one read, a parameter that
nothing reads, and one that is no number to train.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jvp, vmap

import fpipe
from fpipe import BatchError, StageError, schedules, tree
from fpipe.transforms.plain import differentiable_twice
from tests.cut_model import IN_DIMS, language_model, make_batch, make_params
from tests.models import assert_same

PARAMS = make_params()
TRAINED = {name: value for name, value in PARAMS.items() if name != "count"}
BATCH = {n: v[:6] if n != "visible" else v for n, v in make_batch().items()}
VECTOR = tree.tree_map(torch.cos, TRAINED)
SCHEDULES = {
    "zb_h1": schedules.zb_h1(ranks=4, microbatches=3),
    "zbv": schedules.zbv(ranks=2, microbatches=4),  # of two sizes
    "one_f_one_b": schedules.one_f_one_b(ranks=4, microbatches=3),
    "interleaved_1f1b": schedules.interleaved_1f1b(ranks=2, microbatches=2),
}
every_schedule = pytest.mark.parametrize("family", SCHEDULES)


def pipe_of(family: str, **options: Any) -> fpipe.Pipeline:
    options = {"in_dims": IN_DIMS, "compile": False, **options}
    return fpipe.pipeline(language_model, schedule=SCHEDULES[family], **options)


PIPE = pipe_of("zbv")


def whole(params: Any, batch: Any) -> Tensor:
    return language_model({**PARAMS, **params}, batch)


def step(params: Any, batch: Any) -> tuple[Tensor, Any]:
    grads, loss = grad_and_value(whole)(params, batch)
    return loss, grads


def product(params: Any, batch: Any, vector: Any) -> Any:
    with differentiable_twice():
        pushed: Any = jvp(lambda own: grad(whole)(own, batch), (params,), (vector,))
    return pushed[1]


def stacked(value: Any, dim: int = 0) -> Any:
    """Two members."""
    return tree.tree_map(lambda leaf: torch.stack([leaf, 0.9 * leaf], dim), value)


@every_schedule
def test_vmap(family: str) -> None:
    """Members along a dimension of their own, and a whole number that they share."""
    ensemble = fpipe.vmap(pipe_of(family), ({**dict.fromkeys(TRAINED, -1), "count": None}, None))
    members = {**stacked(TRAINED, -1), "count": PARAMS["count"]}
    loss, grads = ensemble.step(members, BATCH)
    assert grads.pop("count") is None
    expected, moved = vmap(step, (-1, None))(stacked(TRAINED, -1), BATCH)
    assert_same((loss, grads), (expected, tree.tree_map(lambda g: g.movedim(0, -1), moved)))
    assert_same(ensemble.value(members, BATCH), expected)


@every_schedule
def test_hvp(family: str) -> None:
    found = fpipe.hvp(pipe_of(family)).step(PARAMS, BATCH, {**VECTOR, "count": None})
    assert found.grads.pop("count") is None
    assert found.hvp.pop("count") is None
    expected = (*step(TRAINED, BATCH), product(TRAINED, BATCH, VECTOR))
    assert_same(tuple(found), expected, 1e-9)


def test_jvp() -> None:
    loss, grads = step(TRAINED, BATCH)
    pairs = zip(*(tree.flatten(side)[0] for side in (grads, VECTOR)), strict=True)
    slope = torch.stack([(g * v).sum() for g, v in pairs]).sum()
    found = fpipe.jvp(pipe_of("zb_h1")).value(TRAINED, BATCH, VECTOR)
    assert_same(tuple(found), (loss, slope))


# ── refusals ────────────────────────────────────────────────────────────────────────────────────


def test_gauss_newton_is_refused_because_there_is_no_output() -> None:
    with pytest.raises(StageError, match=r"is one function, which returns the loss alone: pass"):
        fpipe.ggnvp(PIPE)


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(
        BatchError, match=r"params\['table'\] of shape \(11, 8\): it must be the dim"
    ):
        fpipe.vmap(PIPE, ({**dict.fromkeys(PARAMS), "table": 2}, None)).step(PARAMS, BATCH)
    with pytest.raises(BatchError, match=r"vector\['unused'\] is torch.float64 of shape \(11, 8\)"):
        fpipe.hvp(PIPE).step(TRAINED, BATCH, {**VECTOR, "unused": VECTOR["table"]})
    with pytest.raises(BatchError, match=r"vector is .*, but params is .*: a vector has the struc"):
        fpipe.hvp(PIPE).step(TRAINED, BATCH, {"table": VECTOR["table"]})


@pytest.mark.parametrize("options", [{"has_aux": True}, {"has_state": True}])
def test_what_comes_beside_the_loss_is_refused(options: Any) -> None:
    pipe = pipe_of("zb_h1", **options)
    for transform in (fpipe.vmap, fpipe.hvp):
        with pytest.raises(StageError, match=f"transform a pipeline without {next(iter(options))}"):
            transform(pipe)
