"""Products done by oneDNN where torch's BLAS is slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

import fpipe
from fpipe.pieces import onednn_products
from fpipe.pieces.onednn_products import blas_is_slow, with_onednn

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="needs a build of torch with oneDNN"
)


def single(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rewritten(function: Callable[..., Any], *arguments: Tensor) -> tuple[list[str], fx.GraphModule]:
    """The matrix ops of a function after the rewrite, and what runs them."""
    graph = with_onednn(make_fx(function, tracing_mode="fake")(*arguments).graph)
    graph.lint()
    names = [str(n.target).split(".")[1] for n in graph.nodes if n.op == "call_function"]
    matrix = {"mm", "addmm", "product", "add_product", "products", "bmm", "add"}
    return [n for n in names if n in matrix], fx.GraphModule(torch.nn.Module(), graph)


A, B, C = single(128, 256), single(256, 64, seed=1), single(128, 64, seed=2)
SQUARE, LINE = single(128, 128), single(512)


@needs_onednn
@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (torch.mm, (A, B), ["product"]),
        (lambda a, b: a.t() @ b, (single(256, 128), B), ["product"]),
        (lambda a, b: a @ b.t(), (A, single(64, 256)), ["product"]),
        (lambda a, b: (a.t() @ b.t()).t(), (single(256, 128), single(64, 256)), ["product"]),
        (lambda a, b: a[:, ::2] @ b, (single(128, 512), B), ["product"]),
        (lambda a, b: a @ b[:, ::2], (A, single(256, 128)), ["product"]),
        (lambda a, b: a @ b[0], (A, single(2, 256, 64)), ["product"]),
        (torch.mm, (A[:, :1].expand(-1, 256), B), ["product"]),
        (torch.mm, (A, B[:1].expand(256, -1)), ["product"]),
        (torch.mm, (A, B[:, :1].expand(-1, 64)), ["product"]),
        (torch.mm, (A, B[0, 0].expand(256, 64)), ["product"]),
        (torch.mm, (A, LINE.as_strided((256, 64), (1, 1))), ["product"]),
        (torch.mm, (A, LINE.as_strided((256, 64), (1, 1)).flip(1)), ["product"]),
        (torch.mm, (LINE.as_strided((128, 256), (1, 1)), B), ["product"]),
        (
            torch.addmm,
            (LINE.as_strided((128, 64), (1, 1)), A, LINE.as_strided((256, 64), (1, 1))),
            ["add_product"],
        ),
        (torch.bmm, (single(2, 128, 256), LINE.as_strided((2, 256, 64), (1, 1, 1))), ["products"]),
        (torch.addmm, (C[:1].expand(128, 64), A, B), ["add_product"]),
        (torch.addmm, (C[0, 0].expand(128, 64), A, B), ["add_product"]),
        (torch.addmm, (C[0, 0].expand(64), A, B), ["add_product"]),
        # a bias, and sums over microbatches, in any layout
        (torch.addmm, (C[0], A, B), ["add_product"]),
        (torch.addmm, (C, A, B), ["add_product"]),
        (torch.addmm, (C[0, :1].expand(64), A, B), ["add_product"]),
        (lambda c, a, b: c + a @ b, (C, A, B), ["add_product"]),
        (lambda c, a, b: a @ b + c, (C, A, B), ["add_product"]),
        (lambda c, a, b: a @ b + c.t(), (single(64, 128), A, B), ["add_product"]),
        (lambda c, a, b: c[:, ::2] + a @ b, (single(128, 128), A, B), ["add_product"]),
        (F.linear, (A, B.t().contiguous(), C[0]), ["add_product"]),
        # one for each member of an ensemble
        (torch.bmm, (single(3, 128, 256), single(3, 256, 64)), ["products"]),
        (torch.bmm, (A.expand(2, -1, -1), B.expand(2, -1, -1)), ["products"]),
        (torch.bmm, (single(0, 128, 256), single(0, 256, 64)), ["products"]),
        (lambda a, b: a.mT @ b.mT, (single(2, 256, 128), single(2, 64, 256)), ["products"]),
        # what oneDNN cannot add in one go
        (lambda c, a, b: a @ b + c, (C[:, :1], A, B), ["product", "add"]),
        (lambda c, a, b: a @ b + c, (C.double(), A, B), ["product", "add"]),
        (lambda a, b: a @ b + 1, (A, B), ["product", "add"]),
        (lambda c, a, b: torch.add(c, a @ b, alpha=2), (C, A, B), ["product", "add"]),
        (lambda c, a, b: torch.addmm(c, a, b, beta=2), (C, A, B), ["addmm"]),
        # a product that someone else reads
        (lambda c, a, b: (c + (p := a @ b), p * 2), (C, A, B), ["product", "add"]),
        (lambda a, b: (p := a @ b) + p, (A, B), ["product", "add"]),
        (lambda c, a: c @ a + (c @ c) @ a, (SQUARE, A), ["product", "product", "add_product"]),
        # what stays with torch
        (torch.mm, (single(1, 2048), single(2048, 1024)), ["mm"]),
        (torch.mm, (A[:8], B), ["mm"]),
        (torch.mm, (A.double(), B.double()), ["mm"]),
        (torch.mm, (A.bfloat16(), B.bfloat16()), ["mm"]),
        (torch.bmm, (single(8, 64, 128), single(8, 128, 64)), ["bmm"]),
        (torch.bmm, (single(2, 128, 256).double(), single(2, 256, 64).double()), ["bmm"]),
    ],
)
def test_the_product_is_the_same(
    function: Callable[..., Any], arguments: tuple[Tensor, ...], expected: list[str]
) -> None:
    found, module = rewritten(function, *arguments)
    assert found == expected
    results: Any = optree.tree_leaves(module(*arguments))
    exact: Any = optree.tree_leaves(function(*(a.double() for a in arguments)))
    for mine, theirs in zip(results, exact, strict=True):
        tolerance = 5e-2 if arguments[0].dtype is torch.bfloat16 else 1e-4
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance * 10)


@needs_onednn
def test_factors_that_do_not_fit_are_left_to_be_refused() -> None:
    """Abstract products take factors of two dtypes; oneDNN would misread one of them."""
    found, module = rewritten(torch.mm, A, B.double())
    assert found == ["mm"]
    with pytest.raises(RuntimeError, match="dtype"):
        module(A, B.double())


@needs_onednn
def test_the_graph_that_was_given_is_left_alone() -> None:
    graph = make_fx(torch.mm, tracing_mode="fake")(A, B).graph
    with_onednn(graph)
    assert torch.ops.aten.mm.default in {node.target for node in graph.nodes}


def layers(params: Any, x: Tensor) -> Tensor:
    return (x @ params["up"] + params["bias"]).relu() @ params["down"]


def step_ops(compile: Any = True) -> set[str]:
    """The products that a compiled step calls."""
    params: Any = [
        {
            "up": single(128, 256, seed=2 * s),
            "bias": single(256),
            "down": single(256, 128, seed=2 * s + 1),
        }
        for s in range(2)
    ]
    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
    pipe = fpipe.pipeline([layers] * 2, lambda y, _: y.square().mean(), schedule, compile=compile)
    batch = single(256, 128, seed=9)
    pipe.step(params, batch)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        result = pipe.step(params, batch)

    def plain(params: Any) -> Tensor:
        return layers(params[1], layers(params[0], batch.double())).square().mean()

    exact = optree.tree_map(Tensor.double, params)
    grads, loss = torch.func.grad_and_value(plain)(exact)
    torch.testing.assert_close(result.loss.double(), loss, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(
        optree.tree_leaves(result.grads), optree.tree_leaves(grads), strict=True
    ):
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 1e-4
    return {event.key for event in seen.key_averages()} & {
        "aten::mm",
        "aten::addmm",
        "fpipe::product",
        "fpipe::add_product",
    }


@pytest.fixture
def elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[str, bool], None]]:
    """Pretend to be on another processor."""

    def pretend(information: str, avx512: bool) -> None:
        capability = "AVX512" if avx512 else "AVX2"
        (tmp_path / "cpuinfo").write_text(information)
        monkeypatch.setattr(onednn_products, "_PROCESSORS", tmp_path / "cpuinfo")
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
        onednn_products._is_intel.cache_clear()

    yield pretend
    monkeypatch.undo()
    onednn_products._is_intel.cache_clear()


AMD, INTEL = "vendor_id\t: AuthenticAMD\n", "vendor_id\t: GenuineIntel\n"


@needs_onednn
def test_a_compiled_step_takes_onednn_where_blas_is_slow(
    elsewhere: Callable[[str, bool], None],
) -> None:
    elsewhere(AMD, True)
    assert step_ops() == {"fpipe::product", "fpipe::add_product"}


@needs_onednn
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # of torch 2.11, when it tunes
def test_products_that_inductor_tunes_are_left_to_it(
    elsewhere: Callable[[str, bool], None],
) -> None:
    elsewhere(AMD, True)
    assert step_ops({"options": {"max_autotune_gemm": True}}) <= {"aten::mm", "aten::addmm"}


@needs_onednn
def test_so_does_an_ensemble(elsewhere: Callable[[str, bool], None]) -> None:
    elsewhere(AMD, True)
    schedule = fpipe.schedules.one_f_one_b(ranks=1, microbatches=2)
    pipe = fpipe.pipeline([lambda w, x: x @ w], lambda y, _: y.square().mean(), schedule)
    weights, batch = single(3, 256, 64), single(256, 256, seed=1)
    ensemble = fpipe.vmap(pipe)
    ensemble.step([weights], batch)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        losses, grads = ensemble.step([weights], batch)
    assert "fpipe::products" in {event.key for event in seen.key_averages()}
    for member, weight in enumerate(weights.double()):
        y = batch.double() @ weight
        torch.testing.assert_close(losses[member].double(), y.square().mean(), rtol=1e-4, atol=0)
        expected = batch.double().t() @ (2 * y / y.numel())
        torch.testing.assert_close(grads[0][member].double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("information", "avx512"), [(INTEL, True), (AMD, False), ("Hardware : ARM\n", True)]
)
def test_elsewhere_products_stay_with_blas(
    elsewhere: Callable[[str, bool], None], information: str, avx512: bool
) -> None:
    elsewhere(information, avx512)
    assert not blas_is_slow()


@needs_onednn
def test_a_caller_can_leave_them_to_blas(
    elsewhere: Callable[[str, bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(AMD, True)
    assert blas_is_slow()
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not blas_is_slow()
    assert step_ops() <= {"aten::mm", "aten::addmm"}
