"""Outputs that cannot be differentiated matter only where a reader differentiates them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from tests.models import assert_same, rand

PARAMS = [rand(3, 3), rand(3, 3)]
BATCH = rand(4, 3)


def first(w: Tensor, x: Tensor) -> dict[str, Tensor]:
    h = x @ w
    spoilt = h.exp()
    spoilt.mul_(2)  # its backward needs what was there
    late = h.clone()
    late.mul_(late.detach())
    return {"h": h, "spoilt": spoilt, "late": late}


def detaching(w: Tensor, x: dict[str, Tensor]) -> Tensor:
    return x["h"] @ w + x["spoilt"].detach() + (x["late"].detach() > 0)


def differentiating(w: Tensor, x: dict[str, Tensor]) -> Tensor:
    return x["h"] @ w + x["spoilt"]


def squares(y: Tensor, _: Any) -> Tensor:
    return y.square().mean()


def ending_in(last: Any) -> fpipe.Pipeline:
    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
    return fpipe.pipeline([first, last], squares, schedule, compile=False)


def test_those_that_nobody_differentiates_are_read() -> None:
    own = [leaf.clone().requires_grad_() for leaf in PARAMS]
    loss = squares(detaching(own[1], first(own[0], BATCH)), None)
    grads = torch.autograd.grad(loss, own)
    assert_same(ending_in(detaching).step(PARAMS, BATCH), fpipe.Step(loss.detach(), list(grads)))


def test_those_that_a_reader_differentiates_are_refused() -> None:
    with pytest.raises(fpipe.StageError, match=r"stage 0 \(first\) writes in place to a value tha"):
        ending_in(differentiating).step(PARAMS, BATCH)


def test_input_that_has_no_gradient_asks_for_none() -> None:
    """The batch went through a stage, and what cannot be differentiated by it was refused."""

    def spoils(w: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        raw = x[1].exp()
        raw.mul_(2)
        return x[0] @ w + raw

    stages: list[Any] = [lambda w, x: (x @ w, x * 1), spoils]
    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(stages, squares, schedule, compile=False)
    own = [leaf.clone().requires_grad_() for leaf in PARAMS]
    loss = squares((BATCH @ own[0]) @ own[1] + BATCH.exp() * 2, None)
    grads = torch.autograd.grad(loss, own)
    assert_same(pipe.step(PARAMS, BATCH), fpipe.Step(loss.detach(), list(grads)))
