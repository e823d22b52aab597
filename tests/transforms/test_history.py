"""A pipeline inside a bigger computation, and transforms of torch.func around one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap

import fpipe
from fpipe import FpipeError, schedules, tree
from tests.models import MODELS, assert_same, mlp, unpipelined

MODEL = mlp(4, 6)
PIPE = fpipe.pipeline(
    MODEL.stages, MODEL.loss, schedules.zbv(ranks=2, microbatches=3), compile=False
)
GRADS = unpipelined(*MODEL).grads


def tracked() -> Any:
    return tree.tree_map(lambda leaf: leaf.clone().requires_grad_(), MODEL.params)


def test_backward_through_a_value() -> None:
    params = tracked()
    (PIPE.value(params, MODEL.batch) * 3 + params[0]["b"].sum()).backward()
    expected = tree.tree_map(lambda g: 3 * g, GRADS)
    expected[0]["b"] += 1
    assert_same(tree.tree_map(lambda leaf: leaf.grad, params), expected)


def test_a_training_loop_of_modules() -> None:
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


def test_within_torch_func_grad_and_vjp() -> None:
    def outer(params: Any) -> Tensor:
        return PIPE.value(params, MODEL.batch).square()

    loss = PIPE.value(MODEL.params, MODEL.batch)
    expected = tree.tree_map(lambda g: 2 * loss * g, GRADS)
    assert_same(grad(outer)(MODEL.params), expected)
    found: Any = vjp(outer, MODEL.params)
    assert_same(found[0], loss.square())
    assert_same(found[1](torch.ones_like(loss))[0], expected)


def test_leaves_without_a_gradient() -> None:
    model = MODELS["conv"](2, 4)
    pipe = fpipe.pipeline(
        model.stages, model.loss, schedules.one_f_one_b(ranks=2, microbatches=2), compile=False
    )
    params = tree.tree_map(lambda leaf: leaf.clone(), model.params)
    params[0]["embed"]["stem"].requires_grad_()
    pipe.value(params, model.batch).backward()
    assert_same(params[0]["embed"]["stem"].grad, unpipelined(*model).grads[0]["embed"]["stem"])


def test_without_a_watcher_a_value_has_no_history() -> None:
    with torch.no_grad():
        assert not PIPE.value(tracked(), MODEL.batch).requires_grad
    assert not PIPE.value(MODEL.params, MODEL.batch).requires_grad
    members = tree.tree_map(lambda leaf: leaf[None], tracked())
    assert not fpipe.vmap(PIPE).value(members, MODEL.batch).requires_grad


# ── refusals ────────────────────────────────────────────────────────────────────────────────────


def test_second_derivatives_are_refused() -> None:
    def twice(params: Any) -> Tensor:
        grads = grad(lambda own: PIPE.value(own, MODEL.batch))(params)
        return sum(g.square().sum() for g in tree.flatten(grads)[0])

    with pytest.raises(FpipeError, match=r"fpipe\.hvp\(pipe\) gives products with the second"):
        grad(twice)(MODEL.params)
    params = tracked()
    grads = torch.autograd.grad(
        PIPE.value(params, MODEL.batch), tree.flatten(params)[0], create_graph=True
    )
    with pytest.raises(FpipeError, match="was differentiated twice"):
        grads[0].sum().backward()


def test_other_transforms_of_torch_are_refused_with_the_one_to_use() -> None:
    stacked = tree.tree_map(lambda leaf: leaf[None], MODEL.params)
    for method in (PIPE.step, PIPE.value, lambda p, b: fpipe.step(p, b, pipeline=PIPE)):
        with pytest.raises(FpipeError, match=r"torch\.func\.vmap: fpipe\.vmap\(pipe\) is the"):
            vmap(lambda p, m=method: m(p, MODEL.batch))(stacked)
    with pytest.raises(FpipeError, match=r"torch\.func\.vmap: fpipe\.vmap\(pipe\)"):
        vmap(grad(lambda p: PIPE.value(p, MODEL.batch)))(stacked)
    fpipe.jvp(PIPE)  # torch warns of its own code when it first loads its rules
    with pytest.raises(FpipeError, match=r"fpipe\.jvp\(pipe\) is the pipeline of the derivatives"):
        jvp(lambda p: PIPE.value(p, MODEL.batch), (MODEL.params,), (MODEL.params,))
    with pytest.raises(FpipeError, match=r"pipe\.step returns the gradients already"):
        grad(lambda p: PIPE.step(p, MODEL.batch).loss)(MODEL.params)


def test_a_batch_that_is_differentiated_is_refused() -> None:
    batch = tree.tree_map(lambda leaf: leaf.clone().requires_grad_(), MODEL.batch)
    with pytest.raises(FpipeError, match="by the batch"):
        PIPE.value(tracked(), batch)
    with pytest.raises(FpipeError, match="by the batch"):
        grad(lambda x: PIPE.value(MODEL.params, {**MODEL.batch, "x": x}))(MODEL.batch["x"])
