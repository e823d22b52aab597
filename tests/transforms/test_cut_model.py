"""Transforms of a language model in one function that is cut.

It has a skip value, a table that the first stage and the last one read, a parameter that nothing
reads, one that is no number to train, and a mask that no row of the batch has.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jvp, vmap

import fpipe
from fpipe import BatchError, pytree, schedules
from fpipe.functional.forward_mode import differentiable_twice
from tests.cut_model import IN_DIMS, language_model, make_batch, make_params
from tests.models import assert_same
from tests.transforms.helpers import stacked

PARAMS = make_params()
TRAINED = {name: value for name, value in PARAMS.items() if name != "count"}
BATCH = {n: v[:6] if n != "visible" else v for n, v in make_batch().items()}
VECTOR = pytree.tree_map(torch.cos, TRAINED)
PIPE = fpipe.pipeline(
    language_model,
    schedule=schedules.zbv(ranks=2, microbatches=3),
    in_dims=IN_DIMS,
    compile=False,
)


def whole(params: Any, batch: Any) -> Tensor:
    return language_model({**PARAMS, **params}, batch)


def step(params: Any, batch: Any) -> tuple[Tensor, Any]:
    grads, loss = grad_and_value(whole)(params, batch)
    return loss, grads


def product(params: Any, batch: Any, vector: Any) -> Any:
    with differentiable_twice():
        pushed: Any = jvp(lambda own: grad(whole)(own, batch), (params,), (vector,))
    return pushed[1]


def test_vmap_of_a_cut_model_equals_torch_func() -> None:
    """Members along a dimension of their own, and a whole number that they share."""
    ensemble = fpipe.vmap(PIPE, ({**dict.fromkeys(TRAINED, -1), "count": None}, None))
    members = {**stacked(TRAINED, dim=-1), "count": PARAMS["count"]}
    loss, grads = ensemble.step(members, BATCH)
    assert grads.pop("count") is None
    expected, moved = vmap(step, (-1, None))(stacked(TRAINED, dim=-1), BATCH)
    assert_same((loss, grads), (expected, pytree.tree_map(lambda g: g.movedim(0, -1), moved)))


def test_hvp_of_a_cut_model_equals_torch_func() -> None:
    found = fpipe.hvp(PIPE).step(PARAMS, BATCH, {**VECTOR, "count": None})
    assert found.grads.pop("count") is None
    assert found.hvp.pop("count") is None
    expected = (*step(TRAINED, BATCH), product(TRAINED, BATCH, VECTOR))
    assert_same(tuple(found), expected, 1e-9)


def rows() -> Any:
    """The batch, each row a batch of one along a new first dimension."""
    return {name: leaf if name == "visible" else leaf[:, None] for name, leaf in BATCH.items()}


def test_examples_of_a_cut_model_equal_torch_func() -> None:
    """The parts of the table's gradient are added up before anything is squared."""
    pipe = PIPE
    loss, grads = fpipe.per_example_grads(pipe).step(PARAMS, BATCH)
    assert grads.pop("count") is None
    assert_same((loss, grads), vmap(step, (None, IN_DIMS))(TRAINED, rows()))
    squares = [g.flatten(1).square().sum(1) for g in pytree.flatten(grads)[0]]
    norms = fpipe.per_example_norms(pipe).step(PARAMS, BATCH)
    assert_same(tuple(norms), (loss, torch.stack(squares).sum(0).sqrt()))


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(
        BatchError, match=r"params\['table'\] of shape \(11, 8\): it must be the dim"
    ):
        fpipe.vmap(PIPE, ({**dict.fromkeys(PARAMS), "table": 2}, None)).step(PARAMS, BATCH)
    with pytest.raises(BatchError, match=r"vector\['unused'\] is torch.float64 of shape \(11, 8\)"):
        fpipe.hvp(PIPE).step(TRAINED, BATCH, {**VECTOR, "unused": VECTOR["table"]})
    with pytest.raises(BatchError, match=r"vector lacks .*'qkv'\], .* of params: a vec"):
        fpipe.hvp(PIPE).step(TRAINED, BATCH, {"table": VECTOR["table"]})
