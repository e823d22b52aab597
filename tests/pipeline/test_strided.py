"""Views by strides in functions with cuts, which must not rely on the layout while recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe

cut = fpipe.cut


def written(x: Tensor) -> Tensor:
    x = x * 1
    x.as_strided((2, 2), (1, 2), 1)[:, 1] += 1
    return x


def written_across(x: Tensor) -> Tensor:
    x = x * 1
    view = cut(x.as_strided((2, 2), (4, 1), 5))
    view.mul_(2)
    return x * view.sum()


def unseen(x: Tensor) -> Tensor:
    with torch.no_grad():
        view = x.as_strided((2, 3), (4, 1), 2)
    return x[:2, :3] * cut(view)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: cut(x).as_strided((2, 2), (3, 1)),
    "with an offset": lambda x: cut(x.as_strided((2, 2), (3, 1), 4)).exp(),
    "of a part behind a cut": lambda x: cut(x[1:]).as_strided((2, 2), (3, 1), 5),
    "of a part, with its own offset": lambda x: cut(x[1:]).as_strided((2, 2), (3, 1)),
    "of what was transposed": lambda x: cut(x.t()).as_strided((2, 3), (2, 1), 3),
    "that overlaps": lambda x: cut(x).as_strided((5, 4), (2, 1)) ** 2,
    "of nothing": lambda x: x + cut(x).as_strided((0, 3), (1, 1), 2).sum(),
    "of one element": lambda x: cut(x).as_strided((), (), 7),
    "of complex numbers": lambda x: torch.view_as_real(
        cut(torch.complex(x, x.sin()))[1:]
    ).as_strided((2, 2), (5, 1), 9),
    "written": lambda x: cut(written(cut(x))),
    "written of what was transposed": lambda x: written(cut(x.exp()).t()).t() * x,
    "written behind a cut": written_across,
    "without gradients": unseen,
}


def score(y: Tensor) -> Tensor:
    weights = torch.arange(1.0, 1 + y.numel(), dtype=y.dtype).reshape(y.shape)
    return (y * y * weights).sum()


def loss_of(function: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda params, batch: score(function(batch @ params))


def check(function: Callable[[Tensor], Tensor], **options: Any) -> None:
    torch.manual_seed(0)
    params = torch.randn(4, 4, dtype=torch.float64)
    batch = torch.randn(3, 4, dtype=torch.float64)
    loss_fn = loss_of(function)
    own = params.clone().requires_grad_()
    expected = loss_fn(own, batch)
    expected.backward()
    cuts = 0

    def count(x: Tensor) -> Tensor:
        nonlocal cuts
        cuts += 1
        return x

    globals()["cut"] = count
    try:
        loss_fn(params, batch)
    finally:
        globals()["cut"] = fpipe.cut
    schedule = fpipe.schedules.zb_h1(ranks=cuts + 1, microbatches=1)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, **options)
    step = pipe.step(params, batch)
    torch.testing.assert_close(step, fpipe.Step(expected.detach(), own.grad))
    torch.testing.assert_close(pipe.value(params, batch), expected.detach())


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_equal_to_autograd(function: Callable[[Tensor], Tensor]) -> None:
    check(function, compile=False)
    check(function, compile=False, remat="full")


@pytest.mark.inductor
def test_compiled() -> None:
    check(FUNCTIONS["with an offset"])
    check(FUNCTIONS["written behind a cut"])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: x[1:].as_strided((2,), (1,), 3),
            r"as_strided\(\[2\], .* beyond its mem",
        ),
        (lambda x: x[:, 1:3].as_strided((2,), (1,), 1), "which has gaps in its memory"),
        (lambda x: torch.complex(x, x).conj().as_strided((2,), (1,)).abs(), "resolve_conj"),
        (lambda x: (x[1:].as_strided((2,), (3,), 5).mul_(2), x)[1], "writes in place to a view"),
    ],
    ids=["beyond its memory", "with gaps", "conjugated", "written in a part"],
)
def test_memory_of_others_is_refused(function: Callable[[Tensor], Tensor], message: str) -> None:
    schedule = fpipe.schedules.gpipe(ranks=1, microbatches=1)
    pipe = fpipe.pipeline(loss_of(function), schedule=schedule, compile=False)
    with pytest.raises(fpipe.StageError, match=message):
        pipe.step(torch.eye(4), torch.ones(3, 4))
