"""A loss that is scaled, so that gradients of float16 do not vanish."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fpipe
from fpipe import FpipeError, pytree, schedules
from tests.models import assert_identical

SCHEDULE: Final = schedules.one_f_one_b(ranks=2, microbatches=1)
HALF: Final = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
OPTIONS: Final[list[dict[str, Any]]] = [
    {},
    {"clip": "wait"},
    {"donate": True},
    {"max_norm": 1e-9},
    {"max_norm": 1e-9, "donate": True},
]


def stage(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def loss(y: Tensor, _: Any) -> Tensor:
    """Small, so that in float16 its gradients are 0 without a scale."""
    return y.float().square().mean() * 1e-6


def parameters() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 4), torch.randn(4, 4)]


def batches() -> list[Tensor]:
    """The second overflows in float16."""
    torch.manual_seed(1)
    made = [torch.randn(8, 4) for _ in range(6)]
    made[1][0, 0] = torch.inf
    return made


def half_pipe(**options: Any) -> fpipe.Pipeline:
    return fpipe.pipeline([stage, stage], loss, SCHEDULE, compile=False, mp_policy=HALF, **options)


def scaler_of(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2, **options)


def scaled_by_torch(max_norm: float | None) -> tuple[list[Tensor], list[tuple[float, int]]]:
    """The parameters after each step of torch's own loop, and the scale."""
    weights = [nn.Parameter(w) for w in parameters()]
    optimizer = torch.optim.Adam(weights, lr=0.1, foreach=False)
    scaler, ends = scaler_of(), []
    for x in batches():
        y = x.half()
        for weight in weights:
            y = stage(weight.half(), y)
        scaler.scale(loss(y, None)).backward()
        scaler.unscale_(optimizer)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(weights, max_norm, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        state = scaler.state_dict()
        ends.append((state["scale"], state["_growth_tracker"]))
    return [weight.detach() for weight in weights], ends


@pytest.mark.parametrize("options", OPTIONS)
def test_steps_and_scales_are_those_of_torch(options: dict[str, Any]) -> None:
    trainer = fpipe.train(half_pipe(), torch.optim.Adam, lr=0.1, loss_scale=scaler_of(), **options)
    params = parameters()
    state, ends = trainer.init(params), []
    for x in batches():
        _, params, state, norm = trainer.step(params, state, x)
        assert state.scale is not None and norm is not None
        ends.append((float(state.scale.scale), int(state.scale.growth_tracker)))
    expected, scales = scaled_by_torch(options.get("max_norm"))
    assert ends == scales
    assert int(state.steps) == 5
    for ours, theirs in zip(params, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_step_that_is_left_out_changes_the_scale_alone(options: dict[str, Any]) -> None:
    trainer = fpipe.train(half_pipe(), torch.optim.Adam, lr=0.1, loss_scale="dynamic", **options)
    first, bad = batches()[:2]
    _, params, state, _ = trainer.step(parameters(), trainer.init(parameters()), first)
    before = pytree.tree_map(torch.clone, (params, state))
    _, params, after, norm = trainer.step(params, state, bad)
    assert not norm.isfinite() and after.scale is not None
    assert_identical(
        (params, after._replace(scale=None)), (before[0], before[1]._replace(scale=None))
    )
    assert (float(after.scale.scale), int(after.scale.growth_tracker)) == (2.0**15, 0)


def test_gradients_vanish_without_it() -> None:
    x = batches()[0]
    exact = fpipe.pipeline([stage, stage], loss, SCHEDULE, compile=False).step(parameters(), x)
    without = half_pipe().step(parameters(), x).grads
    assert all((grad == 0).float().mean() > 0.3 for grad in without)
    trainer = fpipe.train(half_pipe(), torch.optim.SGD, lr=1e6, loss_scale="dynamic")
    moved = trainer.step(parameters(), trainer.init(parameters()), x).params
    for before, after, grad in zip(parameters(), moved, exact.grads, strict=True):
        torch.testing.assert_close(before - after, 1e6 * grad, rtol=0.02, atol=1e-3)
    norm = trainer.step(parameters(), trainer.init(parameters()), x).norm
    torch.testing.assert_close(norm, fpipe.global_norm(exact.grads), rtol=0.01, atol=0)


def test_a_weighted_loss_is_scaled_too() -> None:
    def weighted(y: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        return y.float().square().sum() * 1e-6, torch.tensor(float(y.numel()))

    ends = []
    for own, reduction in ((loss, "mean"), (weighted, "weighted")):
        pipe = fpipe.pipeline(
            [stage, stage], own, SCHEDULE, compile=False, mp_policy=HALF, reduction=reduction
        )
        trainer = fpipe.train(pipe, torch.optim.SGD, lr=1e4, loss_scale="dynamic")
        ends.append(trainer.step(parameters(), trainer.init(parameters()), batches()[0]).params)
    for mean, other in zip(*ends, strict=True):
        torch.testing.assert_close(mean, other, rtol=1e-3, atol=1e-4)


def test_the_scale_is_saved(tmp_path: Path) -> None:
    trainer = fpipe.train(half_pipe(), torch.optim.SGD, lr=0.1, loss_scale=scaler_of())
    params = parameters()
    _, params, state, _ = trainer.step(params, trainer.init(params), batches()[1])
    trainer.save(tmp_path / "last", params, state)
    again = trainer.load(tmp_path / "last")
    assert_identical((again.params, again.state), (params, state))
    assert again.state.scale is not None and float(again.state.scale.scale) == 2.0**11
    plain = fpipe.train(half_pipe(), torch.optim.SGD, lr=0.1)
    assert plain.load(tmp_path / "last").state.scale is None
    plain.save(tmp_path / "plain", params, plain.init(params))
    assert_identical(trainer.load(tmp_path / "plain").state.scale, trainer.init(params).scale)


def test_what_cannot_be_scaled() -> None:
    def made(**options: Any) -> fpipe.Trainer:
        return fpipe.train(half_pipe(), torch.optim.SGD, lr=0.1, **options)

    with pytest.raises(FpipeError, match='loss_scale=8 is an int: it must be "dynamic", a torch'):
        made(loss_scale=8)
    trainer, params, x = made(loss_scale="dynamic"), parameters(), batches()[0]
    with pytest.raises(FpipeError, match=r"state is that of a trainer without loss_scale="):
        trainer.step(params, made().init(params), x)
    with pytest.raises(FpipeError, match=r"state is that of a trainer with loss_scale="):
        made().step(params, trainer.init(params), x)
    with pytest.raises(FpipeError, match=r"loss_scale= with the parameter '0' of float16"):
        trainer.init([w.half() for w in params])
    with pytest.raises(FpipeError, match=r"fpipe.vmap of a trainer with loss_scale= or skip"):
        fpipe.vmap(trainer, in_dims=(0, None))
    with pytest.raises(FpipeError, match=r"loss_scale= within a transform of torch.func"):
        torch.func.grad(lambda s: trainer.step(params, trainer.init(params), s * x).loss)(
            torch.tensor(1.0)
        )
    assert made(loss_scale=torch.amp.GradScaler("cpu", enabled=False)).init(params).scale is None
