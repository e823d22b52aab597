"""Writes to parts of values in functions with cuts, which are recorded as ops of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fpipe
from tests.models import rand


def slices(x: Tensor, old: Tensor) -> Tensor:
    x[1:, ::2] = old[:2, 1:3].sin()
    return x


def rows(x: Tensor, old: Tensor) -> Tensor:
    x[-1] = old[0] * old[1]
    x[:, -2] = 2
    return x


def diagonal(x: Tensor, old: Tensor) -> Tensor:
    x.diagonal(1).mul_(old[0, 0])
    x.diagonal(-1, 1, 0).copy_(old[:, 0].sum())
    return x


def wide(x: Tensor, old: Tensor) -> Tensor:
    made = x.unsqueeze(0).repeat(2, 1, 1)
    made.diagonal(0, -3, -2).add_(old[:, :2].t().exp().sum() * old[0].reshape(4, 1))
    made[:, 1:, -3:] *= old[:2, :3]
    return made


def conjugated(x: Tensor, old: Tensor) -> Tensor:
    y = x.conj()
    x[0] = old.conj()[1] * 2
    return x + y.sum()


def turned(x: Tensor, old: Tensor) -> Tensor:
    x[0] = 1j * old[1]
    return (1j * x).conj()


def literals(x: Tensor, old: Tensor) -> Tensor:
    made = torch.tensor([1.0, 2.0, 3.0, 4.0]).neg_()
    if made.sum() < 0:
        made[1:] *= 2
    return x * made


def zeroed(x: Tensor, old: Tensor) -> Tensor:
    x[:, 0].zero_()
    return x * old.clone().zero_().add_(old)


WRITES = [zeroed, literals, slices, rows, diagonal, wide, conjugated, turned]


@pytest.mark.parametrize("is_complex", [True, False], ids=["complex", "real"])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_equal_to_autograd(write: Callable[[Tensor, Tensor], Tensor], is_complex: bool) -> None:
    if write is turned and not is_complex:
        pytest.skip("there is no 1j of a real value")

    def loss_fn(params: Tensor, batch: Tensor) -> Tensor:
        x = batch @ params
        x = fpipe.cut(torch.complex(x, x.cos()) if is_complex else x)
        y = fpipe.cut(write(x * 1, x).exp())
        return (y * y.conj()).real.sum() + (y.imag.sum() if is_complex else 0)

    params, batch = rand(4, 4) / 2, rand(3, 4)
    own = params.clone().requires_grad_()
    expected = loss_fn(own, batch)
    expected.backward()
    schedule = fpipe.schedules.zb_h1(ranks=3, microbatches=1)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    found = pipe.step(params, batch)
    torch.testing.assert_close(found, fpipe.Step(expected.detach(), own.grad))
