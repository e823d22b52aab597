"""Transforms of a pipeline of a module: what torch.func gives of the module itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, grad_and_value, jvp, stack_module_state, vmap

import fpipe
from fpipe import BatchError, StageError, pytree, schedules
from fpipe.functional.forward_mode import differentiable_twice
from tests.models import assert_same
from tests.modules.helpers import detached, module_pipe
from tests.modules.hugging_face import ARCHITECTURES, batch_of, build, cross_entropy
from tests.modules.models import CUTS, LanguageModel, token_batch


def language_model() -> LanguageModel:
    """Of three stages, the one in the middle of which the skip passes."""
    torch.manual_seed(0)
    return LanguageModel(3).double()


MODEL = language_model()
BATCH = token_batch(6)
PIPE = module_pipe(MODEL, CUTS[:2], schedule=schedules.zb_h1(ranks=3, microbatches=3), loss=None)


def whole(params: Any, batch: Any) -> Tensor:
    loss: Tensor = functional_call(MODEL, params, (), batch)["loss"]
    return loss


def test_an_ensemble_of_modules() -> None:
    """Their parameters are stacked as torch does it; what comes back is a module's pipeline."""
    torch.manual_seed(1)
    members, _ = stack_module_state([LanguageModel(3).double() for _ in range(2)])
    ensemble = fpipe.vmap(PIPE)
    assert isinstance(ensemble, fpipe.ModulePipeline)
    assert ensemble.cuts == PIPE.cuts
    loss, grads = ensemble.step(members, BATCH)
    assert_same((grads, loss), vmap(grad_and_value(whole), (0, None))(members, BATCH))
    # One member can be put into a module; all of them cannot, nor are their shapes the module's.
    alone = LanguageModel(3).double()
    ensemble.load_into(alone, {name: leaf[1] for name, leaf in members.items()})
    assert_same(detached(alone), {name: leaf[1].detach() for name, leaf in members.items()})
    with pytest.raises(BatchError, match="load into a module of the same configuration"):
        ensemble.load_into(alone, members)
    with pytest.raises(StageError, match="shapes is missing"):
        ensemble.init(lambda key, name, like: torch.zeros(like.shape), fpipe.random.key(0))


def test_a_product_with_the_hessian_of_a_module() -> None:
    params = detached(MODEL)
    vector = pytree.tree_map(torch.cos, params)
    result = fpipe.hvp(PIPE).step(params, BATCH, vector)
    with differentiable_twice():
        pushed: Any = jvp(lambda params: grad(whole)(params, BATCH), (params,), (vector,))
    grads, loss = grad_and_value(whole)(params, BATCH)
    assert_same(tuple(result), (loss, grads, pushed[1]), 1e-9)


@pytest.mark.inductor
def test_a_compiled_product_with_the_hessian_of_a_module() -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False) for _ in range(2)))
    params, batch = detached(module.double()), {"input": torch.eye(3, dtype=torch.float64)}
    compiled, plain = (
        module_pipe(module, "0", schedule=schedules.zb_h1(ranks=2, microbatches=1), compile=flag)
        for flag in (True, False)
    )
    ours, theirs = (fpipe.hvp(pipe).step(params, batch, params) for pipe in (compiled, plain))
    assert_same(tuple(ours), tuple(theirs))


def test_single_examples_of_a_module() -> None:
    """Its tied table has one gradient, whose parts are added up before the norm is taken."""
    params, rows = detached(MODEL), {name: leaf[:, None] for name, leaf in BATCH.items()}
    by_rows = fpipe.per_example_grads(PIPE)
    assert isinstance(by_rows, fpipe.ModulePipeline)
    loss, grads = by_rows.step(params, BATCH)
    assert_same((grads, loss), vmap(grad_and_value(whole), (None, 0))(params, rows))
    squares = torch.stack([g.flatten(1).square().sum(1) for g in grads.values()])
    norms = fpipe.per_example_norms(PIPE).step(params, BATCH).norms
    assert_same(norms, squares.sum(0).sqrt())


def test_members_of_an_ensemble_share_the_draws_of_a_module() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 3), torch.nn.Dropout(0.5), torch.nn.Linear(3, 3)]
    module = torch.nn.Sequential(*layers).double()
    pipe = module_pipe(module, "0", schedule=schedules.zb_h1(ranks=2, microbatches=2), has_key=True)
    params, batch = detached(module), {"input": torch.ones(4, 3, dtype=torch.float64)}
    members = pytree.tree_map(lambda p: torch.stack([p, 2 * p]), params)
    key = fpipe.random.key(1)
    result = fpipe.vmap(pipe, randomness="same").step(members, batch, key)
    for number in range(2):
        alone = pipe.step(pytree.tree_map(lambda p, n=number: p[n], members), batch, key)
        assert_same(pytree.tree_map(lambda leaf, n=number: leaf[n], tuple(result)), tuple(alone))
    with pytest.raises(StageError, match=r"randomness"):
        fpipe.vmap(pipe).step(members, batch, key)


def test_a_model_of_hugging_face() -> None:
    module = build("gpt2", 2)
    params, batch = detached(module), batch_of("gpt2", 4)
    pipe = module_pipe(
        module,
        ARCHITECTURES["gpt2"].cuts(2),
        schedule=schedules.zb_h1(ranks=2, microbatches=2),
        loss=cross_entropy,
    )

    def loss_of(params: Any, batch: Any) -> Tensor:
        return cross_entropy(functional_call(module, params, (), batch), batch)

    loss, grads = fpipe.per_example_grads(pipe).step(params, batch)
    for number in range(4):
        row = pytree.tree_map(lambda leaf, n=number: leaf[n : n + 1], batch)
        alone = grad_and_value(loss_of)(params, row)
        assert_same((pytree.tree_map(lambda g, n=number: g[n], grads), loss[number]), alone, 1e-9)


def test_frozen_parameters_have_no_direction() -> None:
    module = language_model()
    module.embedding.requires_grad_(requires_grad=False)
    pipe = module_pipe(module, CUTS[:2], schedule=PIPE.schedule, loss=None)
    params = detached(module)
    vector = pytree.tree_map(torch.cos, params) | {"embedding.weight": None}
    result = fpipe.hvp(pipe).step(params, BATCH, vector)
    trained = {name: leaf for name, leaf in params.items() if name != "embedding.weight"}

    def whole_of(leaves: Any) -> Tensor:
        return whole(params | leaves, BATCH)

    with differentiable_twice():
        pushed: Any = jvp(grad(whole_of), (trained,), ({n: vector[n] for n in trained},))
    grads, loss = grad_and_value(whole_of)(trained)
    none = {"embedding.weight": None}
    assert_same(tuple(result), (loss, grads | none, pushed[1] | none), 1e-9)
    grads = fpipe.per_example_grads(pipe).step(params, BATCH).grads
    assert grads["embedding.weight"] is None
    assert grads["blocks.0.qkv.weight"].shape == (6, 24, 8)
