"""Sums of weight gradients by a kernel: its numbers by Triton's interpreter; where it enters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fpipe
from fpipe import schedules
from fpipe.pieces.wgrad_sums import OPTION, Operand, Problem, choose_measured, with_wgrad_kernel

pytest.importorskip("triton")
ROOT: Final = Path(__file__).parents[2]
SHORT: Final = torch.bfloat16


@cache
def interpreted() -> Any:
    """What `interpreted_wgrad` prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.stage.interpreted_wgrad"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.inductor
def test_the_kernel_adds_the_plain_product() -> None:
    """Odd shapes, strides and dtypes: what float32 sums are from float64 ones."""
    errors = dict(interpreted()["errors"])
    empty = errors.pop("nothing"), errors.pop("none")
    assert empty == (True, [0, 4])  # matrices without elements
    assert len(errors) == 6 * 4 + 4
    assert {case: error for case, error in errors.items() if error > 2e-6} == {}


@pytest.mark.inductor
def test_the_faster_way_is_chosen() -> None:
    """A way that fails or errs is left, and the caller's generator stays as it is."""
    found = interpreted()["choices"]
    assert found == {"faster": 1, "slower": None, "fails": 2, "errs": 2, "drew": False}


@pytest.mark.inductor
def test_a_compiled_step_takes_the_kernel() -> None:
    found = interpreted()["steps"]
    assert found["kernel"] == 1 and found["off"] == 0
    assert found["error, kernel"] < 2e-2 and found["error, off"] < 2e-2, found


@pytest.mark.inductor
@pytest.mark.parametrize("number", range(4))
def test_the_kernel_compiles_for_a_device_that_is_not_here(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To tensor cores of an H100, with loads under way, in the memory that a program has there."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # or Triton 3.9 warns that it is unset
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fpipe.pieces.wgrad_kernel import CONFIGS, GROUP, _add_product

    config, names = CONFIGS[number], _add_product.arg_names
    constants = {
        "WIDEN": False,
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "DEPTH": config.depth,
        "GROUP": GROUP,
    }
    constants |= dict.fromkeys(("so_far_column", "total_column", "a_row", "b_column"), 1)
    signature = dict.fromkeys(names, "i32") | dict.fromkeys(constants, "constexpr")
    signature |= dict.fromkeys(("so_far_pointer", "total_pointer"), "*fp32")
    signature |= dict.fromkeys(("a_pointer", "b_pointer"), "*bf16")
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name not in constants
    }
    kernel = triton.compile(
        ASTSource(_add_product, signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": config.warps, "num_stages": config.stages},
    )
    assert kernel.metadata.shared < 227 * 1024
    assert "wgmma.mma_async" in kernel.asm["ptx"] and "cp.async" in kernel.asm["ptx"]


# ── where it enters ─────────────────────────────────────────────────────────────────────────────

C, A, B = torch.randn(6, 5), torch.randn(6, 4).to(SHORT), torch.randn(4, 5).to(SHORT)


def rewritten(
    function: Callable[..., Any], *arguments: Tensor, config: int | None = 2
) -> tuple[list[str], list[Problem]]:
    """The operations of a function after the rewrite, and what was asked about."""
    asked: list[Problem] = []

    def choose(problem: Problem) -> int | None:
        asked.append(problem)
        return config

    traced = make_fx(function, tracing_mode="fake")(*arguments).graph
    before = [node.target for node in traced.nodes]
    graph = with_wgrad_kernel(traced, choose, {})
    graph.lint()
    assert [node.target for node in traced.nodes] == before
    names = [str(n.target).split(".")[1] for n in graph.nodes if n.op == "call_function"]
    for node in graph.nodes:
        if "sum_with_product" in str(node.target):
            operands: Any = node.args
            so_far, a, b, number = operands
            assert number == config
            assert a.meta["val"].shape[1] == b.meta["val"].shape[0]
            assert node.meta["val"].shape == so_far.meta["val"].shape
    return names, asked


def test_a_sum_with_a_product() -> None:
    names, asked = rewritten(lambda c, a, b: [c + (a @ b).float()], C, A, B)
    assert names == ["sum_with_product"]
    (problem,) = asked
    assert problem.so_far == Operand((6, 5), (5, 1), torch.float32)
    assert problem.a == Operand((6, 4), (4, 1), SHORT) and problem.b.shape == (4, 5)


def test_a_product_that_is_turned() -> None:
    """As of a weight that lies by columns: its factors are turned instead."""
    names, asked = rewritten(lambda c, a, b: [c + (a @ b).t().float()], C.t(), A, B)
    assert names == ["t", "t", "sum_with_product"]
    assert asked[0].a == Operand((5, 4), (1, 5), SHORT)
    assert asked[0].b == Operand((4, 6), (1, 4), SHORT)


def test_a_sum_that_is_left() -> None:
    names, asked = rewritten(lambda c, a, b: [c + (a @ b).float()], C, A, B, config=None)
    assert names == ["mm", "_to_copy", "add"] and len(asked) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda c, a, b: [c + (a @ b)],  # rounded to 16 bits, and not by a cast of its own
        lambda c, a, b: [c.exp() + (a @ b).float()],  # of no sum that came in
        lambda c, a, b: [c + (a @ b).float(), c * 2],  # of what serves something else
        lambda c, a, b: [(c + (a @ b).float()).exp()],  # of what is no result
        lambda c, a, b: [c + (p := (a @ b).float()), p * 2],
        lambda c, a, b: [torch.add(c, (a @ b).float(), alpha=2)],
        lambda c, a, b: [c[:1] + (a @ b).float()],
        lambda c, a, b: [c.double() + (a @ b).double()],
        lambda c, a, b: [c + 1.0, (a @ b).float()],
        lambda c, a, b: [c + (a.float() @ b.float())],  # which BLAS adds itself
    ],
)
def test_what_is_no_sum_of_weight_gradients(function: Callable[..., Any]) -> None:
    names, asked = rewritten(function, C, A, B)
    assert not asked and "sum_with_product" not in names


def test_a_row_that_stands_for_all_is_no_sum() -> None:
    assert not rewritten(lambda c, a, b: [c + (a @ b).float()], C[:1], A, B)[1]


def test_on_the_cpu_nothing_is_measured() -> None:
    operand = Operand((4, 4), (4, 1), SHORT)
    problem = Problem(operand, operand, operand, torch.device("cpu"), {})
    assert choose_measured(problem) is None


def test_abstract_sums_lie_as_the_sum_does() -> None:
    abstract = torch.empty(5, 6, device="meta").t()
    a, b = A.to("meta"), B.to("meta")
    total = torch.ops.fpipe.sum_with_product(abstract, a, b, 0)
    assert total.stride() == abstract.stride() and total.dtype is torch.float32


def test_the_option_is_true_or_false() -> None:
    schedule = schedules.gpipe(ranks=1, microbatches=1)
    with pytest.raises(fpipe.StageError, match=r"says 'never' of 'fpipe.wgrad_kernel': it is True"):
        fpipe.pipeline(
            [lambda w, x: x @ w],
            lambda y, _: y.mean(),
            schedule,
            compile={"options": {OPTION: "never"}},
        )
