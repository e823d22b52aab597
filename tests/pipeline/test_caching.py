"""Traced once for each kind of arguments; compiled once for each distinct graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

import fpipe
from fpipe import pytree, schedules
from fpipe.schedules import interleaved_1f1b
from tests.models import (
    assert_same,
    boxed,
    mlp,
    mlp_first,
    mlp_layer,
    plain_pipeline,
    rand,
    unpipelined,
)


def counted(calls: list[int]) -> Callable[[Any, Any], Tensor]:
    """A first stage that notes when it is traced."""

    def first(p: Any, batch: Any) -> Tensor:
        calls.append(1)
        return mlp_first(p, batch)

    return first


@contextmanager
def retraces(calls: list[int], expected: bool) -> Iterator[None]:
    calls.clear()
    yield
    assert bool(calls) == expected


def test_traced_again_only_for_new_kinds_of_arguments() -> None:
    calls: list[int] = []
    model = mlp(2, 6)
    pipe = plain_pipeline([counted(calls), mlp_layer])

    def step(params: Any = model.params, rows: int = 6, batch: Any = model.batch) -> None:
        batch = {name: leaf[:rows] for name, leaf in batch.items()}
        expected = unpipelined(model.stages, model.loss, params, batch)
        assert_same(pipe.step(params, batch), expected, tolerance=1e-5)

    with retraces(calls, True):
        step()
    with retraces(calls, False):
        step()
        step(params=[pytree.tree_map(lambda leaf: leaf + 1, part) for part in model.params])
    with retraces(calls, True):
        step(rows=4)
    with retraces(calls, False):
        step(rows=5)  # microbatches of 3 and 2 rows, both seen before
        step(rows=6)
        step(rows=4)
    with retraces(calls, True):
        step(batch=model.batch | {"extra": rand(6)})
    transposed = [model.params[0] | {"w": model.params[0]["w"].t()}, model.params[1]]
    with retraces(calls, True):
        step(params=transposed)
    single = [pytree.tree_map(lambda leaf: leaf.float(), part) for part in model.params]
    with retraces(calls, True):
        step(params=single, batch={name: leaf.float() for name, leaf in model.batch.items()})
    other = model.batch | {"another": rand(6)}
    with retraces(calls, True):
        pipe.value(model.params, other)
    with retraces(calls, False):
        pipe.forward(model.params, other)  # the first stage is that of `value`
    with retraces(calls, True):
        pipe.step(model.params, other)


def test_what_a_step_has_traced_serves_evaluation(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    model = mlp(3, 6)
    pipe = plain_pipeline([counted(calls), mlp_layer, mlp_layer])
    with caplog.at_level(logging.INFO, logger="fpipe"):
        loss = pipe.step(model.params, model.batch).loss
        with retraces(calls, False):
            assert torch.equal(pipe.value(model.params, model.batch), loss)
            y = pipe.forward(model.params, model.batch)
            assert torch.allclose(model.loss(y, model.batch), loss)
    started = [r.message.split(" for ")[0] for r in caplog.records if " rows" in r.message]
    assert started == ["tracing step", "planning value", "tracing forward"]
    fresh = plain_pipeline(model.stages)
    assert torch.equal(fresh.value(model.params, model.batch), loss)
    assert torch.equal(fresh.forward(model.params, model.batch), y)
    assert_same(fresh.step(model.params, model.batch), pipe.step(model.params, model.batch))


@pytest.mark.parametrize("has_aux", [False, True])
def test_what_a_step_of_a_cut_function_has_traced_serves_evaluation(has_aux: bool) -> None:
    calls: list[int] = []

    def loss_fn(w: Tensor, x: Tensor) -> Any:
        calls.append(1)
        y = fpipe.cut(torch.linalg.inv(w) @ x.T)  # its backward has checks of its own
        loss = torch.linalg.solve(w, y).square().mean()
        return (loss, y.sum(0)) if has_aux else loss

    w, x = torch.eye(3).double() + rand(3, 3) / 4, rand(4, 3)
    schedule = schedules.gpipe(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False, has_aux=has_aux)
    step = pipe.step(w, x)
    with retraces(calls, False):
        found = pipe.forward(w, x) if has_aux else (pipe.value(w, x), None)
    assert_same(tuple(found), (step.loss, step.aux if has_aux else None))
    # What is left out of the value alone has to be traced without it.
    with retraces(calls, has_aux):
        assert torch.equal(pipe.value(w, x), step.loss)


def test_autocast_counts() -> None:
    model = mlp(2, 4, torch.float32)
    pipe = plain_pipeline(model.stages)
    plain = pipe.step(model.params, model.batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = pipe.step(model.params, model.batch)
        expected = unpipelined(*model)
    assert_same(cast, expected, tolerance=1e-2)
    assert not cast.loss.equal(plain.loss)
    after = pipe.step(model.params, model.batch)
    assert after.loss.equal(plain.loss)
    with torch.autocast("cpu", dtype=torch.float16):
        half = pipe.step(model.params, model.batch)
    assert not half.loss.equal(cast.loss)


def test_autocast_of_no_kind_when_kernels_run() -> None:
    """Casts were recorded, for two kinds of devices too."""
    seen: set[str] = set()

    def look() -> None:
        seen.update(kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))

    def watched(graph: fx.GraphModule, _: Any) -> Any:
        return boxed(graph, look)

    model = mlp(2, 4)
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, compile=watched)
    with torch.autocast("cpu", torch.bfloat16):
        torch.set_autocast_enabled("cuda", True)
        try:
            pipe.step(model.params, model.batch)
        finally:
            torch.set_autocast_enabled("cuda", False)
    assert not seen


def test_default_dtype_counts() -> None:
    def first(p: Any, batch: Any) -> Tensor:
        return batch["x"] * torch.full((), 1 / 3)  # in the default dtype

    model = mlp(1, 2, torch.float16)
    pipe = plain_pipeline([first], lambda y, _: y.sum())
    before = torch.get_default_dtype()
    dtypes = []
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            dtypes.append(pipe.step([None], {"x": rand(2).long()}).loss.dtype)
    finally:
        torch.set_default_dtype(before)
    assert dtypes == [torch.float32, torch.float64, torch.float32]
    assert model.params


def test_choice_of_kernels_counts() -> None:
    made: list[list[str]] = []

    def watched(module: fx.GraphModule, examples: Any) -> Any:
        made.append([str(node.target) for node in module.graph.nodes])
        return lambda inputs: module(*inputs)

    def stage(w: Tensor, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(w * x, x, x)

    schedule = schedules.gpipe(ranks=1, microbatches=1)
    pipe = fpipe.pipeline([stage], lambda y, _: y.sum(), schedule, compile=watched)
    call = partial(pipe.value, [torch.ones(())], rand(2, 2, 4, 8))
    expected = call()
    with sdpa_kernel(SDPBackend.MATH):
        assert_same(call(), expected)
    call()
    fused = ["aten._scaled_dot_product_flash_attention_for_cpu.default" in graph for graph in made]
    assert fused == [True, False]
    # The same graph, of which Inductor makes other kernels.
    torch.use_deterministic_algorithms(True)
    try:
        assert_same(call(), expected)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(made) == 3 and made[2] == made[0]


def test_default_device_counts() -> None:
    def stage(_: None, x: Tensor) -> Tensor:
        return x * len(torch.zeros(1).device.type)

    pipe = plain_pipeline([stage], lambda y, _: y.mean())
    found = []
    for device in ("cpu", "meta", "cpu"):
        batch = torch.ones(2)
        with torch.device(device):
            found.append(float(pipe.value([None], batch)))
    assert found == [3, 4, 3]


def test_first_call_says_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp(2, 5)
    pipe = plain_pipeline(model.stages)
    with caplog.at_level(logging.INFO, logger="fpipe"):
        pipe.step(model.params, model.batch)
    said = [record.message for record in caplog.records if record.name == "fpipe"]
    assert said[0] == "tracing step for microbatches of 3 and 2 rows"
    assert any(line.startswith("making F of stage 0 (mlp_first)") for line in said)
    assert any(line.startswith("making W of stage 0 (mlp_first)") for line in said)
    assert said[-1].startswith("ready for step after ")
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="fpipe"):
        pipe.step(model.params, model.batch)
    assert not [record for record in caplog.records if record.name == "fpipe"]


def test_each_new_trace_says_what_changed(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp(2, 6)
    pipe = plain_pipeline(model.stages)
    x, y = model.batch["x"], model.batch["y"]
    wider = [model.params[0], {"w": model.params[1]["w"], "b": torch.zeros(2, 1, 3).double()}]
    turned = {"x": x, "y": y.T.contiguous().T}
    calls: list[tuple[Any, Any]] = [
        (model.params, model.batch),
        (model.params, {"x": x[:4], "y": y[:4]}),
        (model.params, model.batch),  # kept
        (wider, model.batch),
        (model.params, {"x": (x, x), "y": y}),
        ([{"w": p["w"].T.contiguous().T, "b": p["b"]} for p in model.params], turned),
    ]
    with caplog.at_level(logging.INFO, logger="fpipe"):
        for params, batch in calls:
            with suppress(fpipe.StageError):  # what cannot be traced is announced too
                pipe.step(params, batch)
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(model.params, model.batch)
    traced = [r.message for r in caplog.records if r.message.startswith("tracing")]
    assert [line.removeprefix("tracing step for microbatches of ") for line in traced] == [
        "3 rows",
        "2 rows, again (1 kept), because the microbatch changed: ['x'] is float64[2, 3] on cpu, "
        "was float64[3, 3] on cpu",
        "3 rows, again (2 kept), because the parameters of stage 1 changed: ['b'] is "
        "float64[2, 1, 3] on cpu, was float64[3] on cpu",
        "3 rows, again (3 kept), because the parameters of stage 1 changed: ['b'] is "
        "float64[3] on cpu, was float64[2, 1, 3] on cpu",
        "3 rows, again (3 kept), because the parameters of stage 0 changed: ['w'] is float64[3, 3] "
        "on cpu of strides (1, 3), was float64[3, 3] on cpu of strides (3, 1)",
        "3 rows, again (4 kept), because the parameters of stage 0 changed: ['w'] is float64[3, 3] "
        "on cpu of strides (3, 1), was float64[3, 3] on cpu of strides (1, 3)",
    ]


# ── sharing ─────────────────────────────────────────────────────────────────────────────────────


class Spy:
    """A compiler that counts."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, module: fx.GraphModule, examples: Any) -> Callable[[list[Tensor]], Any]:
        self.compiled += 1

        def call(inputs: list[Tensor]) -> Any:
            taken = tuple(inputs)
            inputs.clear()
            return module(*taken)

        return call


def compiled_graphs(middle: Callable[[int], Callable[..., Any]], stages: int) -> int:
    """How many graphs a pipeline compiles whose inner stages `middle` makes."""
    spy = Spy()
    model = mlp(stages, 4)
    chain = [mlp_first, *(middle(index) for index in range(stages - 2)), mlp_layer]
    schedule = interleaved_1f1b(ranks=2, microbatches=2, stages_per_rank=stages // 2)
    pipe = fpipe.pipeline(chain, model.loss, schedule, compile=spy)
    assert_same(
        pipe.step(model.params, model.batch),
        unpipelined(chain, model.loss, model.params, model.batch),
    )
    return spy.compiled


def the_same(index: int) -> Callable[..., Any]:
    return mlp_layer


def scaled(by: float, p: Any, x: Tensor) -> Tensor:
    return mlp_layer(p, x) * by


def a_partial(index: int) -> Callable[..., Any]:
    return partial(scaled, 2.0)


def a_closure(index: int) -> Callable[..., Any]:
    shift = rand(3) * index
    return lambda p, x: mlp_layer(p, x) + shift


@pytest.mark.parametrize("middle", [the_same, a_partial, a_closure])
def test_compiled_graphs_grow_with_distinct_stages(middle: Callable[[int], Any]) -> None:
    assert compiled_graphs(middle, 4) == compiled_graphs(middle, 8)


def test_stages_that_differ_do_not_share() -> None:
    def different(index: int) -> Callable[..., Any]:
        return partial(scaled, 2.0 + index)

    assert compiled_graphs(different, 8) > compiled_graphs(different, 4)


def test_schedules_share_what_was_traced_and_compiled(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    model, spy = mlp(4, 8), Spy()
    chain = [counted(calls), *model.stages[1:]]
    pipe = fpipe.pipeline(chain, model.loss, schedules.gpipe(ranks=4, microbatches=4), compile=spy)
    expected = unpipelined(*model)
    assert_same(pipe.step(model.params, model.batch), expected)
    split = pipe.with_schedule(schedules.zbv(ranks=2, microbatches=4))
    with retraces(calls, False):
        assert_same(split.step(model.params, model.batch), expected)
    # GPipe has B for I and W; now there is nothing left to compile.
    compiled = spy.compiled
    with retraces(calls, False), caplog.at_level(logging.INFO, "fpipe"):
        for name, ranks in (("zb_h1", 4), ("interleaved_1f1b", 2), ("gpipe", 4)):
            again = split.with_schedule(schedules.get(name, ranks=ranks, microbatches=4))
            assert_same(again.step(model.params, model.batch), expected)
    assert spy.compiled == compiled
    said = [record.message for record in caplog.records if record.name == "fpipe"]
    assert said[0] == "planning step for microbatches of 2 rows"
    # What is new to one of them is new to all, once.
    smaller = pytree.tree_map(lambda leaf: leaf[:4], model.batch)
    with retraces(calls, True):
        split.value(model.params, smaller)
    with retraces(calls, False):
        pipe.value(model.params, smaller)


def test_schedules_share_what_a_transform_has_traced() -> None:
    calls: list[int] = []
    model = mlp(2, 4)
    pipe = plain_pipeline([counted(calls), mlp_layer])
    vector = pytree.tree_map(torch.ones_like, model.params)
    one = schedules.one_f_one_b(ranks=2, microbatches=2)
    product = fpipe.hvp(pipe)
    norms = fpipe.per_example_norms(pipe)
    first = product.step(model.params, model.batch, vector)
    of_rows = norms.step(model.params, model.batch)
    with retraces(calls, False):
        again = product.with_schedule(one).step(model.params, model.batch, vector)
        rows_again = norms.with_schedule(one).step(model.params, model.batch)
    assert_same(again, first)
    assert_same(rows_again, of_rows)


def test_remat_of_the_last_microbatch_alone_adds_graphs() -> None:
    model = mlp(2, 4)
    counts = {}
    for remat in ("none", "full", "except_last"):
        spy = Spy()
        schedule = schedules.gpipe(ranks=2, microbatches=4)
        pipe = fpipe.pipeline(model.stages, model.loss, schedule, remat=remat, compile=spy)
        pipe.step(model.params, model.batch)
        counts[remat] = spy.compiled
    assert counts["except_last"] > counts["none"]


def test_many_shapes_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Each was traced and kept without a word."""
    pipe = fpipe.pipeline(
        lambda w, x: (w * x).sum(), schedule=schedules.gpipe(ranks=1, microbatches=1), compile=False
    )
    with caplog.at_level(logging.WARNING, "fpipe"):
        for length in range(1, 36):
            pipe.step(torch.ones(1), torch.ones(1, length))
    (record,) = caplog.records
    assert record.message.startswith("32 sets of shapes or modes have been traced")
    assert "float32[1, 33]" in record.message
