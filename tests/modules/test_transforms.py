"""Transforms of a pipeline of a module: what torch.func gives of the module itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, grad_and_value, jvp, stack_module_state, vmap

import fpipe
from fpipe import schedules, tree
from fpipe.transforms.plain import differentiable_twice
from tests.models import assert_same
from tests.modules.models import CUTS, LanguageModel, detached, language_model, make_batch

MODEL = language_model()
BATCH = make_batch(6)
PIPE = fpipe.from_module(
    MODEL, schedule=schedules.zbv(ranks=2, microbatches=3), cuts=CUTS, compile=False
)


def whole(params: Any, batch: Any) -> Tensor:
    loss: Tensor = functional_call(MODEL, params, (), batch)["loss"]
    return loss


def test_an_ensemble_of_modules() -> None:
    """Their parameters are stacked as torch does it; what comes back is a module's pipeline."""
    torch.manual_seed(1)
    members, _ = stack_module_state([LanguageModel().double() for _ in range(2)])
    ensemble = fpipe.vmap(PIPE)
    assert isinstance(ensemble, fpipe.ModulePipeline)
    assert ensemble.cuts == PIPE.cuts
    loss, grads = ensemble.step(members, BATCH)
    assert_same((grads, loss), vmap(grad_and_value(whole), (0, None))(members, BATCH))


def test_a_product_with_the_hessian_of_a_module() -> None:
    params = detached(MODEL)
    vector = tree.tree_map(torch.cos, params)
    found = fpipe.hvp(PIPE).step(params, BATCH, vector)
    with differentiable_twice():
        pushed: Any = jvp(lambda own: grad(whole)(own, BATCH), (params,), (vector,))
    grads, loss = grad_and_value(whole)(params, BATCH)
    assert_same(tuple(found), (loss, grads, pushed[1]), 1e-9)
