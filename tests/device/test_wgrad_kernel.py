"""The kernel for sums of weight gradients, on a real device: its numbers, its time, and a step."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

import fpipe
from fpipe import schedules
from fpipe.pieces import inductor, wgrad_sums
from fpipe.pieces.wgrad_sums import OPTION, Operand, Problem, choose_measured

pytestmark = [pytest.mark.cuda, pytest.mark.real_device]

SHAPES = [(1, 1, 1), (33, 65, 129), (1000, 2048, 700), (4096, 8192, 1024)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    from fpipe.pieces.wgrad_kernel import CONFIGS, add_product

    rows, depth, columns = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda")

    a, b = draw(depth, rows).to(dtype).t(), draw(depth, 2 * columns).to(dtype)[:, ::2]
    so_far = draw(columns, rows).t()
    expected = so_far.double() + a.double() @ b.double()
    scale = (so_far.abs() + a.abs().float() @ b.abs().float()).max()
    for config in CONFIGS:
        result = add_product(so_far, a, b, config)
        assert result.stride() == so_far.stride()
        assert (result - expected).abs().max() < 1e-5 * scale


@pytest.mark.parametrize("width", [1024, 4096])
def test_it_is_timed_beside_inductor(width: int, caplog: pytest.LogCaptureFixture) -> None:
    """Whichever is faster: that a choice is made, and what it is."""
    wgrad_sums._measured.cache_clear()
    short = torch.bfloat16
    problem = Problem(
        Operand((4 * width, width), (width, 1), torch.float32),
        Operand((4 * width, 8192), (1, 4 * width), short),
        Operand((8192, width), (width, 1), short),
        torch.device("cuda", torch.cuda.current_device()),
        {},
    )
    with caplog.at_level(logging.INFO, "fpipe"):
        choose_measured(problem)
    (text,) = [text for text in caplog.messages if text.startswith("a sum with a product")]
    print(text)
    assert "nan" not in text


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_another_device_than_the_current_one() -> None:
    from fpipe.pieces.wgrad_kernel import CONFIGS, add_product

    a = torch.eye(32, device="cuda:1").bfloat16()
    result = add_product(torch.ones(32, 32, device="cuda:1"), a, a, CONFIGS[-1])
    assert torch.equal(result, 1 + torch.eye(32, device="cuda:1"))


def test_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel in all sums, and without."""
    weights = [torch.randn(256, 256, device="cuda").div(16).bfloat16() for _ in range(2)]
    x = torch.randn(64, 256, device="cuda").bfloat16()
    grads = []
    for takes in (True, False):
        monkeypatch.setattr(inductor, "choose_measured", lambda problem: 1)
        pipe = fpipe.pipeline(
            [lambda w, x: torch.tanh(x @ w)] * 2,
            lambda y, _: y.float().square().mean(),
            schedules.zb_h1(ranks=2, microbatches=4),
            compile={"options": {OPTION: takes}},
            accum_dtype=torch.float32,
        )
        grads.append(pipe.step(weights, x).grads)
    for mine, theirs in zip(*grads, strict=True):
        assert (mine - theirs).abs().max() < 1e-2 * theirs.abs().max()
