"""Every transform, compiled by Inductor: what the traced graphs give uncompiled.

Ensembles of a transformer, Hessian products and gradients by row are compiled in the files of their
own; here are the others, of the smallest model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fpipe
from fpipe import schedules, tree
from tests.models import assert_same, mlp

MODEL = mlp(2, 4, torch.float32)
VECTOR = tree.tree_map(torch.cos, MODEL.params)
MEMBERS = tree.tree_map(lambda p: torch.stack([p, 1.1 * p]), MODEL.params)

CALLS: dict[str, Callable[[Any], Any]] = {
    "jvp": lambda pipe: fpipe.jvp(pipe).value(MODEL.params, MODEL.batch, VECTOR),
    "ggnvp": lambda pipe: fpipe.ggnvp(pipe).step(MODEL.params, MODEL.batch, VECTOR),
    "norms": lambda pipe: fpipe.per_example_norms(pipe).step(MODEL.params, MODEL.batch),
    "grad": lambda pipe: fpipe.grad(pipe, ("batch", "params")).step(MODEL.params, MODEL.batch),
    "vmap of hvp": lambda pipe: fpipe.vmap(fpipe.hvp(pipe), (0, None, None)).step(
        MEMBERS, MODEL.batch, VECTOR
    ),
}


@pytest.mark.inductor
@pytest.mark.parametrize("name", CALLS)
def test_compiled_in_float32(name: str) -> None:
    schedule = schedules.zb_h1(ranks=2, microbatches=1)
    compiled, plain = (
        fpipe.pipeline(MODEL.stages, MODEL.loss, schedule, compile=flag) for flag in (True, False)
    )
    assert_same(tuple(CALLS[name](compiled)), tuple(CALLS[name](plain)), 1e-4)
