"""What a loss function returns beside the loss: a weight, and aux."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from fpipe import schedules
from fpipe.program.program import Send
from tests.models import assert_same, mlp
from tests.returns_model import (
    EXPERTS,
    OUT_DIMS,
    by_microbatch,
    make_batch,
    make_params,
    microbatches,
    plain_loss,
    weighted_model,
    weighted_sum,
)

SCHEDULES = [
    schedules.one_f_one_b(ranks=4, microbatches=4),
    schedules.zb_h1(ranks=4, microbatches=4),
    schedules.zbv(ranks=2, microbatches=4),
]


# All schedules share the traces of these.


@cache
def of_weights() -> fpipe.Pipeline:
    return fpipe.pipeline(weighted_sum, schedule=SCHEDULES[0], reduction="weighted", compile=False)


@cache
def of_aux() -> fpipe.Pipeline:
    return fpipe.pipeline(
        weighted_model,
        schedule=SCHEDULES[0],
        reduction="weighted",
        has_aux=True,
        out_dims=OUT_DIMS,
        remat="full",
        compile=False,
    )


def expected_step() -> tuple[Any, Tensor]:
    result: tuple[Any, Tensor] = torch.func.grad_and_value(by_microbatch)(
        make_params(), make_batch()
    )
    return result


# ── weights ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_weighted_loss_is_exact_over_microbatches_of_different_weight(
    schedule: fpipe.Schedule,
) -> None:
    pipe = of_weights().with_schedule(schedule)
    params, batch = make_params(), make_batch()
    weights = [int((part["targets"] >= 0).sum()) for part in microbatches(batch)]
    assert weights == [15, 1, 5, 4]  # the mean of means would be far from the mean
    grads, loss = expected_step()
    assert_same(pipe.step(params, batch), fpipe.Step(loss, grads))
    assert_same(pipe.value(params, batch), loss)


@pytest.mark.parametrize(
    ("kind", "beside"),
    [
        (int, "nothing"),
        (float, "aux"),
        (torch.int64, "a state and aux"),
        (torch.uint8, "aux"),
        (torch.bool, "nothing"),
        (int, "a state and aux"),
    ],
)
def test_a_weight_that_is_no_float(kind: Any, beside: str) -> None:
    """A number of Python's was refused, under a transform by an error of torch.vmap's."""
    w, x = torch.tensor([0.5, -2.0], dtype=torch.float64), torch.arange(10.0).double().view(5, 2)

    def weighed(w: Tensor, x: Tensor) -> Any:
        if isinstance(kind, type):
            weight: Any = kind(len(x))
        else:
            weight = torch.tensor(len(x)).to(kind)
        return (torch.tanh(x @ w) ** 2).sum(), weight

    def loss_fn(w: Tensor, *rest: Any) -> Any:
        found = weighed(fpipe.cut(w * 1), rest[-1])
        if beside == "nothing":
            return found
        return (found, {}, x[:1]) if beside == "a state and aux" else (found, x[:1])

    state = beside == "a state and aux"
    pipe = fpipe.pipeline(
        loss_fn,
        schedule=schedules.gpipe(ranks=2, microbatches=2),
        reduction="weighted",
        has_aux=beside != "nothing",
        has_state=state,
        compile=False,
    )
    total = 2 if kind is torch.bool else 5  # of microbatches of three rows and two

    def plain(w: Tensor) -> Tensor:
        return (torch.tanh(x @ w) ** 2).sum() / total

    grads, loss = torch.func.grad_and_value(plain)(w)
    found = pipe.step(w, {}, x) if state else pipe.step(w, x)
    torch.testing.assert_close((found.loss, found.grads), (loss, grads))
    if state:
        return
    many = fpipe.vmap(pipe).step(torch.stack([w, -w]), x)
    torch.testing.assert_close(many.grads, torch.stack([grads, -grads]))
    along = fpipe.jvp(pipe).value(w, x, w)
    torch.testing.assert_close(along.jvp, grads @ w)
    if beside == "nothing" and kind is int:
        rows = torch.stack([torch.tanh(row @ w) ** 2 for row in x])
        torch.testing.assert_close(fpipe.per_example_norms(pipe).step(w, x).loss, rows)


@pytest.mark.parametrize("kind", [int, float])
def test_a_weight_that_is_a_number_of_stages_and_of_a_module(kind: Any) -> None:
    x = torch.arange(10.0).double().view(5, 2)
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh()).double()
    params = {name: value.detach() for name, value in module.named_parameters()}
    schedule = schedules.gpipe(ranks=2, microbatches=2)

    def loss(y: Tensor, _: Any) -> Any:
        return y.square().sum(), kind(len(y))

    def first(p: Any, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, p["0.weight"], p["0.bias"])

    expected = module(x).square().sum().detach() / 5
    options: Any = {"schedule": schedule, "reduction": "weighted", "compile": False}
    of_module = fpipe.from_module(module, cuts=["0"], loss=loss, **options)
    torch.testing.assert_close(of_module.step(params, {"input": x}).loss, expected)
    of_stages = fpipe.pipeline([first, lambda _, h: torch.tanh(h)], loss, **options)
    torch.testing.assert_close(of_stages.step([params, None], x).loss, expected)
    stacked = {name: torch.stack([value, value]) for name, value in params.items()}
    both = fpipe.vmap(of_stages).step([stacked, None], x).loss
    torch.testing.assert_close(both, expected.expand(2))


def test_auxiliary_loss_of_a_middle_stage_is_part_of_the_loss() -> None:
    # One microbatch: the balance of the experts is then that of the batch, and its gradient goes
    # back to the second stage straight from the last.
    schedule = schedules.one_f_one_b(ranks=4, microbatches=1)
    pipe = fpipe.pipeline(weighted_sum, schedule=schedule, reduction="weighted", compile=False)
    params, batch = make_params(), make_batch()

    def whole(params: Any) -> Tensor:
        total, weight = weighted_sum(params, batch)
        return total / weight

    grads, loss = torch.func.grad_and_value(whole)(params)
    assert_same(pipe.step(params, batch), fpipe.Step(loss, grads))
    assert float(grads["gate"].abs().max()) > 1e-3
    sent = [
        (i.message.source, i.message.target)
        for program in pipe.programs(params, batch)
        for i in program.instructions
        if isinstance(i, Send)
    ]
    assert (1, 3) in sent and (3, 1) in sent


def test_weight_of_stage_functions() -> None:
    model = mlp(2, 6)
    kept = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.5], dtype=torch.float64)

    def loss(y: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        errors = (y - batch["y"]).square().sum(-1)
        return (errors * batch["kept"]).sum(), batch["kept"].sum()

    schedule = schedules.zb_h1(ranks=2, microbatches=3)
    pipe = fpipe.pipeline(model.stages, loss, schedule, reduction="weighted", compile=False)
    batch = {**model.batch, "kept": kept}

    def whole(params: Any, x: Tensor) -> Tensor:
        y: Any = {**batch, "x": x}
        for stage, own in zip(model.stages, params, strict=True):
            y = stage(own, y)
        total, weight = loss(y, batch)
        return total / weight

    grads, value = torch.func.grad_and_value(whole)(model.params, batch["x"])
    assert_same(pipe.step(model.params, batch), fpipe.Step(value, grads))
    by_batch = fpipe.grad(pipe, "batch").step(model.params, batch).grads
    assert_same(by_batch["x"], torch.func.grad(whole, argnums=1)(model.params, batch["x"]))


def test_weight_is_a_constant_to_the_derivative() -> None:
    def loss_fn(w: Tensor, x: Tensor) -> Any:
        h = fpipe.cut(x * w)
        return h.square().sum(), h.sum()

    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, reduction="weighted", compile=False)
    loss, grads = pipe.step(torch.tensor(2.0), torch.ones(4))
    assert (loss.item(), grads.item()) == (2.0, 2.0)  # 4w²/8, and 8w/8


def test_weights_that_are_all_zero_make_no_number() -> None:
    def loss_fn(w: Tensor, x: Tensor) -> Any:
        return (w * x).sum(), torch.zeros(())

    schedule = schedules.gpipe(ranks=1, microbatches=2)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, reduction="weighted", compile=False)
    assert pipe.step(torch.tensor(2.0), torch.zeros(4)).loss.isnan()


# ── aux ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_aux_of_every_stage_comes_back_merged(schedule: fpipe.Schedule) -> None:
    pipe = of_aux().with_schedule(schedule)
    params, batch = make_params(), make_batch()
    grads, loss = expected_step()
    found = pipe.step(params, batch)
    assert isinstance(found, fpipe.StepAux)
    assert_same(tuple(found[:2]), (loss, grads))
    parts = [weighted_model(params, part)[1] for part in microbatches(batch)]
    expected = {
        "load": torch.cat([part["load"] for part in parts]),
        "counts": parts[-1]["counts"],  # None in out_dims
        "hidden": weighted_model(params, batch)[1]["hidden"],
        "tokens": batch["tokens"],
        "tied": params["table"],
        "wrong": torch.stack([part["wrong"] for part in parts]),
    }
    assert_same(found.aux, expected)
    assert found.aux["load"].shape == (4, EXPERTS) and found.aux["wrong"].shape == (4,)
    assert found.aux["tied"] is not params["table"]
    forward = pipe.forward(params, batch)
    assert isinstance(forward, fpipe.ForwardAux)
    assert_same(tuple(forward), (loss, expected))
    assert_same(pipe.value(params, batch), loss)
    assert not found.aux["hidden"].requires_grad


def test_aux_of_a_mean_and_of_stage_functions() -> None:
    model = mlp(2, 6)

    def loss(y: Tensor, batch: Any) -> Any:
        return (y - batch["y"]).square().mean(), {"y": y, "worst": (y - batch["y"]).abs().max()}

    schedule = schedules.zb_h1(ranks=2, microbatches=3)
    plain = fpipe.pipeline(model.stages, model.loss, schedule, compile=False)
    pipe = fpipe.pipeline(model.stages, loss, schedule, has_aux=True, compile=False)
    found = pipe.step(model.params, model.batch)
    assert_same(tuple(found[:2]), tuple(plain.step(model.params, model.batch)))
    output = plain.forward(model.params, model.batch)
    assert_same(found.aux["y"], output)
    worst = (output - model.batch["y"]).abs().reshape(3, -1).amax(1)
    assert_same(found.aux["worst"], worst)
    assert_same(pipe.forward(model.params, model.batch), output)


def test_value_computes_no_aux() -> None:
    seen: list[int] = []

    def count(graph: torch.fx.GraphModule, arguments: Any) -> Any:
        seen.append(sum("argmax" in str(node.target) for node in graph.graph.nodes))
        return graph

    schedule = schedules.one_f_one_b(ranks=4, microbatches=1)
    pipe = fpipe.pipeline(
        plain_loss, schedule=schedule, has_aux=True, out_dims=OUT_DIMS,
        compile=lambda graph, arguments: boxed(count(graph, arguments)),
    )  # fmt: skip
    pipe.value(make_params(), make_batch())
    assert seen and not any(seen)
    pipe.forward(make_params(), make_batch())
    assert any(seen)


def boxed(graph: torch.fx.GraphModule) -> Any:
    def call(arguments: list[Any]) -> Any:
        values = list(arguments)
        arguments.clear()
        return graph(*values)

    return call


# ── refusals ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("returned", "options", "rule"),
    [
        (lambda x: (x.sum(), {}), {}, r"returns a tuple of 2: .* or declare .* has_aux=True"),
        (
            lambda x: x.sum(),
            {"has_aux": True},
            r"returns float32\[\]: with has_aux=True loss_fn\(params, batch\) must return "
            r"\(loss, aux\)",
        ),
        (
            lambda x: (x, {}),
            {"has_aux": True},
            r"returns float32\[2\]: .* must return \(loss, aux\), whose loss is one floating",
        ),
        (
            lambda x: x.sum(),
            {"reduction": "weighted"},
            r'with reduction="weighted" loss_fn\(params, batch\) must return \(sum, weight\)',
        ),
        (
            lambda x: (x.sum(), x),
            {"reduction": "weighted"},
            r"a sum with the weight float32\[2\]: .* whose weight is one real number",
        ),
        (
            lambda x: (x.sum(), True),
            {"reduction": "weighted"},
            r"a sum with the weight a bool: .* whose weight is one real number, an int, a float",
        ),
        (
            lambda x: (x.sum(), {"n": 3}),
            {"has_aux": True},
            r"returns aux\['n'\]=3, an int: aux must be a pytree of tensors",
        ),
    ],
)
def test_another_form_than_declared_is_refused(
    returned: Any, options: dict[str, Any], rule: str
) -> None:
    schedule = schedules.gpipe(ranks=1, microbatches=2)
    pipe = fpipe.pipeline(lambda w, x: returned(x * w), schedule=schedule, compile=False, **options)
    with pytest.raises(fpipe.StageError, match=rule):
        pipe.step(torch.tensor(1.0), torch.ones(4))


def test_aux_that_cannot_be_merged_is_refused() -> None:
    schedule = schedules.gpipe(ranks=1, microbatches=2)
    pipe = fpipe.pipeline(
        lambda w, x: ((x * w).sum(), {"y": x}),
        schedule=schedule, has_aux=True, out_dims=1, compile=False,
    )  # fmt: skip
    with pytest.raises(fpipe.BatchError, match=r"out_dims is 1 for aux\['y'\] of shape \(2,\)"):
        pipe.step(torch.tensor(1.0), torch.ones(4))
