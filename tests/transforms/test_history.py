"""A pipeline inside a bigger computation, and transforms of torch.func around one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp

import fpipe
from fpipe import pytree, schedules
from tests.models import MODELS, assert_same, mlp, unpipelined
from tests.transforms.helpers import tracked

MODEL = mlp(4, 6)
PIPE = fpipe.pipeline(
    MODEL.stages, MODEL.loss, schedules.zbv(ranks=2, microbatches=3), compile=False
)
GRADS = unpipelined(*MODEL).grads


def test_backward_through_a_value_equals_torch() -> None:
    params = tracked(MODEL.params)
    (PIPE.value(params, MODEL.batch) * 3 + params[0]["b"].sum()).backward()
    expected = pytree.tree_map(lambda g: 3 * g, GRADS)
    expected[0]["b"] += 1
    assert_same(pytree.tree_map(lambda leaf: leaf.grad, params), expected)


def test_training_loop_of_modules() -> None:
    layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    stages = [lambda p, x, m=m: functional_call(m, p, (x,)) for m in layers]
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(stages, lambda y, _: y.square().mean(), schedule, compile=False)
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = pipe.value([dict(m.named_parameters()) for m in layers], torch.ones(4, 3))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]


def test_value_within_torch_func_grad_and_vjp() -> None:
    def outer(params: Any) -> Tensor:
        return PIPE.value(params, MODEL.batch).square()

    loss = PIPE.value(MODEL.params, MODEL.batch)
    expected = pytree.tree_map(lambda g: 2 * loss * g, GRADS)
    assert_same(grad(outer)(MODEL.params), expected)
    found: Any = vjp(outer, MODEL.params)
    assert_same(found[0], loss.square())
    assert_same(found[1](torch.ones_like(loss))[0], expected)


def test_leaves_that_require_no_gradient_get_none() -> None:
    model = MODELS["conv"](2, 4)
    pipe = fpipe.pipeline(
        model.stages, model.loss, schedules.one_f_one_b(ranks=2, microbatches=2), compile=False
    )
    params = pytree.tree_map(lambda leaf: leaf.clone(), model.params)
    params[0]["embed"]["stem"].requires_grad_()
    pipe.value(params, model.batch).backward()
    assert_same(params[0]["embed"]["stem"].grad, unpipelined(*model).grads[0]["embed"]["stem"])


def test_value_without_autograd_has_no_history() -> None:
    with torch.no_grad():
        assert not PIPE.value(tracked(MODEL.params), MODEL.batch).requires_grad
    assert not PIPE.value(MODEL.params, MODEL.batch).requires_grad
    norms = fpipe.per_example_norms(PIPE)
    with pytest.raises(fpipe.FpipeError, match="of one that returns norms"):
        norms.value(tracked(MODEL.params), MODEL.batch).sum().backward()


def test_backward_of_a_value_by_the_batch() -> None:
    leaves = pytree.tree_map(lambda leaf: leaf.clone().requires_grad_(), MODEL.batch)
    params = tracked(MODEL.params)
    (PIPE.value(params, leaves) * 3).backward()
    assert_same(pytree.tree_map(lambda leaf: leaf.grad, params),
                pytree.tree_map(lambda g: 3 * g, GRADS))  # fmt: skip
    (by_batch,) = fpipe.grad(PIPE, ("batch",)).step(MODEL.params, MODEL.batch).grads
    assert_same(pytree.tree_map(lambda leaf: leaf.grad / 3, leaves), by_batch)
    # The argnums of step do not matter here.
    alone = tracked(MODEL.params)
    fpipe.grad(PIPE, "batch").value(alone, MODEL.batch).backward()
    assert_same(pytree.tree_map(lambda leaf: leaf.grad, alone), GRADS)
