"""What is easily done wrong at first: each mistake is told by what to do instead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe import BatchError, FpipeError, StageError, schedules

TWO = schedules.zb_h1(ranks=2, microbatches=2)
W = torch.eye(3)
PARAMS, X = [W, W], torch.ones(4, 3)
BATCH = {"x": X, "y": X}


def layer(w: Tensor, x: Any) -> Tensor:
    return torch.tanh((x["x"] if isinstance(x, dict) else x) @ w)


def square(y: Tensor, batch: Any) -> Tensor:
    return (y - batch["y"]).square().mean()


def make(stages: Any = (layer, layer), loss: Any = square, **options: Any) -> fpipe.Pipeline:
    return fpipe.pipeline(stages, loss, TWO, compile=False, **options)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# ── arguments ───────────────────────────────────────────────────────────────────────────────────

ONE_BATCH = r"the data of a step is one pytree, such as \{'x': x, 'y': y\}"


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda pipe: pipe.step(PARAMS, X, X), f"got 3 arguments, but takes 2: .*; {ONE_BATCH}"),
        (lambda pipe: pipe.step(PARAMS, X, X, X), f"got 4 arguments, .*; {ONE_BATCH}"),
        (lambda pipe: pipe.value(PARAMS, X, target=X), f"by name target: it .*; {ONE_BATCH}"),
        (lambda pipe: pipe.step(PARAMS, **BATCH), f"by name x, y: it takes params, b.*{ONE_BATCH}"),
        (lambda pipe: fpipe.profile(pipe, PARAMS, X, 5), f"got 3 arguments, but .*{ONE_BATCH}"),
        (lambda pipe: pipe.step(PARAMS), "got 1 arguments, but takes 2: params, batch$"),
    ],
)
def test_data_in_several_arguments(call: Callable[[fpipe.Pipeline], Any], rule: str) -> None:
    with pytest.raises(BatchError, match=rule):
        call(make())


def test_a_key_that_is_none_may_come_last() -> None:
    assert make().step(PARAMS, BATCH, None).loss == make().step(PARAMS, BATCH).loss


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ((layer, TWO), "is the schedule: of one function, .* schedule=…"),
        (([layer], TWO, square), "loss=.* is a Schedule: after the stages"),
        (([layer], None, TWO), "one function of the whole model, .* a list"),
    ],
)
def test_arguments_in_another_order(arguments: tuple[Any, ...], rule: str) -> None:
    with pytest.raises(StageError, match=rule):
        fpipe.pipeline(*arguments)


def test_the_class_is_not_called() -> None:
    called: Any = fpipe.Pipeline
    with pytest.raises(StageError, match=r"is not called directly: fpipe\.pipeline"):
        called([layer, layer])


@pytest.mark.parametrize(
    ("grads", "rule"),
    [
        (lambda: make().step(PARAMS, BATCH), r"grads is a Step: pass its \.grads$"),
        (
            lambda: fpipe.hvp(make()).step(PARAMS, BATCH, PARAMS),
            r"grads is a Hvp: pass its \.grads or \.hvp$",
        ),
        (lambda: fpipe.clip_by_global_norm([W], 1.0), r"grads is a Clipped: pass its \.grads$"),
    ],
)
def test_a_norm_of_all_that_a_step_returns(grads: Callable[[], Any], rule: str) -> None:
    """The loss was counted as a gradient, and scaled as one."""
    for call in (fpipe.global_norm, lambda own: fpipe.clip_by_global_norm(own, 1.0)):
        with pytest.raises(FpipeError, match=rule):
            call(grads())


# ── functions that take something else ──────────────────────────────────────────────────────────


def swapped(x: Any, w: Any) -> Tensor:
    return torch.tanh(x["x"] @ w)


def named(w: Tensor, x: Any, *, key: Tensor) -> Tensor:
    return layer(w, x)


@pytest.mark.parametrize(
    ("stages", "loss", "rule"),
    [
        ([swapped, layer], square, r"stage 0 .*\(it is called as fn\(params, x\)\)$"),
        ([lambda w: w, layer], square, r"it is called as fn\(params, x\)\)$"),
        ([named, layer], square, r"fn\(params, x\); fpipe.Stage\(.*, reads_key=True a key\)$"),
        (
            [fpipe.Stage(layer, reads_batch=True), layer],
            square,
            r"it is called as fn\(params, x, microbatch\)\)$",
        ),
        ([layer, layer], lambda batch, y: (batch["y"] - y).sum(), r"loss\(y, microbatch\), with"),
        ([layer, layer], lambda y: y.mean(), r"it is called as loss\(y, microbatch\), with the "),
    ],
)
def test_how_a_function_is_called_is_told(stages: Any, loss: Any, rule: str) -> None:
    with pytest.raises(StageError, match=rule):
        make(stages, loss).step(PARAMS, BATCH)


def test_how_one_function_is_called_is_told() -> None:
    def loss_fn(batch: Any, w: Tensor, key: Tensor) -> Tensor:
        return fpipe.cut(batch["x"] @ w).mean()

    pipe = fpipe.pipeline(loss_fn, schedule=TWO, compile=False, has_key=True)
    with pytest.raises(StageError, match=r"\(it is called as loss_fn\(params, batch, key=key\)\)"):
        pipe.step(W, BATCH, fpipe.random.key(0))


# ── results that are right and not meant ────────────────────────────────────────────────────────


def without_gradient(y: Tensor, batch: Any) -> Tensor:
    with torch.no_grad():
        return y.mean()


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, batch: square(y.detach(), batch),
        lambda y, batch: y.argmax(1).to(y.dtype).mean(),
        without_gradient,
    ],
)
def test_a_loss_that_depends_on_no_parameter(loss: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert not any(g.any() for g in make(loss=loss).step(PARAMS, BATCH).grads)
    (told,) = warnings(caplog)
    assert told.startswith("all gradients of this step are 0: the loss depends on nothing")


def test_one_function_that_depends_on_no_parameter(caplog: pytest.LogCaptureFixture) -> None:
    def detached(w: Tensor, x: Tensor) -> Tensor:
        return fpipe.cut(x @ w).detach().mean()

    pipe = fpipe.pipeline(detached, schedule=TWO, compile=False)
    pipe.value(W, X)
    assert not warnings(caplog)
    pipe.step(W, X)
    read, zero = warnings(caplog)
    assert read.endswith(
        "detached), the last, reads no parameter: a stage ends where fpipe.cut is called, or after "
        "the submodule that cuts= names"
    )
    assert zero.startswith("all gradients of this step are 0")


def test_gradients_that_happen_to_be_zero_are_nobody_s_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    make(loss=lambda y, batch: (0 * y).sum()).step(PARAMS, BATCH)
    linear = make([lambda w, x: x["x"] @ w, lambda w, x: x @ w], lambda y, batch: y.sum())
    fpipe.hvp(linear).step(PARAMS, BATCH, PARAMS)
    assert not warnings(caplog)


def test_a_weight_before_its_sum() -> None:
    """The gradients were 0, and the loss was the weight divided by the sum."""

    def weighted(y: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        return torch.tensor(4.0), y.square().sum()

    rule = "declared as .sum, weight., and .* the first depends on no parameter, but the second"
    with pytest.raises(StageError, match=rule):
        make(loss=weighted, reduction="weighted").step(PARAMS, BATCH)
    one = fpipe.pipeline(
        lambda w, x: weighted(fpipe.cut(x @ w), x), schedule=TWO, reduction="weighted",
        compile=False,
    )  # fmt: skip
    with pytest.raises(StageError, match=rule):
        one.step(W, X)


def test_a_cut_after_all_parameters(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    params = dict(module.named_parameters())
    for cut, said in (("1", []), ("2", ["stage 1 (Sequential), the last, reads no parameter: a "])):
        pipe = fpipe.from_module(
            module, schedule=TWO, cuts=[cut], loss=lambda y, batch: y.mean(), compile=False
        )
        pipe.step(params, {"input": X})
        assert [text[: len(said[0])] for text in warnings(caplog)] == said


def test_a_pipeline_before_its_process_group(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dist.group.WORLD` is None until there is one, and every process trained the whole model."""
    make(group=torch.distributed.group.WORLD)
    assert not warnings(caplog)
    monkeypatch.setenv("WORLD_SIZE", "2")
    make(group=torch.distributed.group.WORLD)
    (told,) = warnings(caplog)
    assert told.startswith("a pipeline of the whole model in each of 2 processes: for one over")


# ── what is shown ───────────────────────────────────────────────────────────────────────────────


def test_what_is_for_users_alone_is_listed() -> None:
    shown = {name for name in dir(make()) if not name.startswith("_")}
    assert shown == {
        "add_up",
        "forward",
        "init",
        "load",
        "load_state",
        "local",
        "own",
        "place",
        "programs",
        "rank",
        "replicate",
        "save",
        "schedule",
        "shard",
        "step",
        "value",
        "with_schedule",
    }
    for module in (fpipe.nn, fpipe.random, fpipe.schedules):
        assert dir(module) == list(module.__all__)
        assert all(hasattr(module, name) for name in dir(module))
