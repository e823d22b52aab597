"""Views by strides in functions with cuts, which must not rely on the layout while recorded."""

from __future__ import annotations

import itertools
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
    "of rows, beyond them": lambda x: x[1:].as_strided((2,), (1,), 3),
    "of columns, between them": lambda x: x[:, 1:3].as_strided((2,), (1,), 1),
    "of what is conjugated": lambda x: torch.complex(x, x).conj().as_strided((2,), (1,)).abs(),
}


def score(y: Tensor) -> Tensor:
    weights = torch.arange(1.0, 1 + y.numel(), dtype=y.dtype).reshape(y.shape)
    return (y * y * weights).sum()


def loss_of(function: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda params, batch: score(function(batch @ params))


def check_views(function: Callable[[Tensor], Tensor], **options: Any) -> None:
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


@pytest.mark.parametrize(("name", "remat"), list(zip(FUNCTIONS, itertools.cycle(["none", "full"]))))
def test_equal_to_autograd(name: str, remat: str) -> None:
    check_views(FUNCTIONS[name], compile=False, remat=remat)


@pytest.mark.inductor
def test_compiled() -> None:
    """A view with an offset, which crosses a cut and is written to there."""
    check_views(FUNCTIONS["written behind a cut"])


def test_write_to_a_view_of_a_view_is_refused() -> None:
    """torch cannot record it."""
    schedule = fpipe.schedules.gpipe(ranks=1, microbatches=1)
    loss_fn = loss_of(lambda x: (x[1:].as_strided((2,), (3,), 5).mul_(2), x)[1])
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    with pytest.raises(fpipe.StageError, match=r"writes in place to a view by way of as_strided"):
        pipe.step(torch.eye(4), torch.ones(3, 4))


@pytest.mark.parametrize("cuts", [True, False])
def test_view_beyond_the_memory_is_refused(cuts: bool) -> None:
    """As it is without a pipeline."""
    loss_fn = loss_of(lambda x: x[1:].as_strided((2,), (3,), 10))
    schedule = fpipe.schedules.gpipe(ranks=1, microbatches=1)
    if cuts:
        pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    else:
        pipe = fpipe.pipeline([loss_fn], lambda y, _: y, schedule, compile=False)
    params: Any = torch.eye(4)
    with pytest.raises(RuntimeError, match="out of bounds"):
        loss_fn(params, torch.ones(3, 4))
    with pytest.raises(fpipe.StageError, match=r"beyond its memory at .*test_strided\.py:\d+: "):
        pipe.step(params if cuts else [params], torch.ones(3, 4))
