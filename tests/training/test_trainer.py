"""Whole training steps as a pure function, beside the loop that a user of torch writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

import fpipe
from fpipe import FpipeError, Stage, pytree, schedules
from tests.models import (
    Model,
    apply,
    assert_identical,
    assert_same,
    mlp,
    pipe_of,
    piped,
    unpipelined,
)

STEPS: Final = 4
SCHEDULE: Final = schedules.zb_h1(ranks=2, microbatches=4)


def by_hand(
    model: Model,
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    max_norm: float | None = None,
) -> tuple[list[Tensor], Any, list[Tensor]]:
    """Losses, last parameters and norms of the loop that a user writes, without a pipeline."""
    leaves, spec = pytree.flatten(model.params)
    leaves = [leaf.clone() for leaf in leaves]
    optimizer = make(leaves)
    losses, norms = [], []
    for _step in range(STEPS):
        params = pytree.unflatten(spec, leaves)
        loss, grads = unpipelined(model.stages, model.loss, params, model.batch)
        for leaf, grad in zip(leaves, pytree.flatten(grads)[0], strict=True):
            leaf.grad = grad
        if max_norm is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(leaves, max_norm))
        optimizer.step()
        losses.append(loss)
    return losses, pytree.unflatten(spec, leaves), norms


def by_trainer(trainer: fpipe.Trainer, model: Model, **hyper: Any) -> list[fpipe.TrainStep]:
    params, state = model.params, trainer.init(model.params)
    steps = []
    for _step in range(STEPS):
        steps.append(trainer.step(params, state, model.batch, **hyper))
        _, params, state, _ = steps[-1]
    return steps


def adam(leaves: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(leaves, lr=0.1, foreach=False)


@pytest.mark.parametrize("family", sorted(set(schedules.FAMILIES) - {"forward_only"}))
def test_training_equals_the_loop_of_torch_on_every_schedule(family: str) -> None:
    schedule = schedules.get(family, ranks=2, microbatches=4)
    model, pipe = piped(mlp, schedule, 8)
    trainer = fpipe.train(pipe, torch.optim.AdamW, lr=0.1)
    steps = by_trainer(trainer, model)
    losses, params, _ = by_hand(model, adam)
    assert_same([step.loss for step in steps], losses)
    assert_same(steps[-1].params, params)
    assert int(steps[-1].state.steps) == STEPS
    assert steps[-1].norm is None


@pytest.mark.parametrize("max_norm", [0.05, 1e3])
def test_clipping_is_that_of_torch(max_norm: float) -> None:
    model = mlp(2, 8)
    trainer = fpipe.train(pipe_of(model), torch.optim.AdamW, lr=0.1, max_norm=max_norm)
    steps = by_trainer(trainer, model)
    _, params, norms = by_hand(model, adam, max_norm)
    assert_same(steps[-1].params, params)
    assert_same([step.norm for step in steps], norms)
    assert (norms[0] > max_norm) == (max_norm < 1)  # both ways are taken


def test_nothing_that_is_passed_in_is_changed() -> None:
    model = mlp(2, 8)
    trainer = fpipe.train(pipe_of(model), torch.optim.SGD, lr=0.1, momentum=0.9)
    state = trainer.init(model.params)
    before = pytree.tree_map(torch.clone, (model.params, state))
    _, _, after, _ = trainer.step(model.params, state, model.batch)
    trainer.step(model.params, after, model.batch)
    assert_identical((model.params, state), before)


def test_a_step_may_have_hyperparameters_of_its_own() -> None:
    model = mlp(2, 8)
    trainer = fpipe.train(pipe_of(model), torch.optim.SGD, lr=5.0)
    own = by_trainer(trainer, model, lr=0.1)
    usual = by_trainer(fpipe.train(trainer.pipe, torch.optim.SGD, lr=0.1), model)
    assert_identical(own[-1].params, usual[-1].params)


def test_groups_have_hyperparameters_of_their_own() -> None:
    model = mlp(2, 8)
    groups = {"0.b": None, "*.b": {"lr": 0.0}, "1.*": {"weight_decay": 0.5}}
    trainer = fpipe.train(pipe_of(model), torch.optim.SGD, lr=5.0, groups=groups)
    params = by_trainer(trainer, model, lr=0.1)[-1].params

    def make(leaves: list[Tensor]) -> torch.optim.Optimizer:
        _, w0, _, w1 = leaves  # in the order of sorted keys
        groups: list[dict[str, Any]] = [{"params": [w0]}, {"params": [w1], "weight_decay": 0.5}]
        return torch.optim.SGD(groups, lr=0.1)

    assert_same(params, by_hand(model, make)[1])
    assert trainer.init(model.params).moments[0]["b"] is None


def test_groups_may_be_chosen_by_path() -> None:
    model = mlp(2, 8)
    groups = [(lambda path: path[0] == 1, {"lr": 0.0})]
    trainer = fpipe.train(pipe_of(model), torch.optim.SGD, lr=0.1, groups=groups)
    params = by_trainer(trainer, model)[-1].params
    assert_identical(params[1], model.params[1])
    assert not torch.equal(params[0]["w"], model.params[0]["w"])


def test_frozen_parameters_have_no_state_and_stay() -> None:
    model = mlp(2, 8)
    trainer = fpipe.train(pipe_of(model, trainable=[False, True]), torch.optim.Adam, lr=0.1)
    steps = by_trainer(trainer, model)
    assert steps[-1].params[0]["w"] is model.params[0]["w"]
    assert steps[-1].state.moments[0] == {"w": None, "b": None}
    assert set(steps[-1].state.moments[1]["w"]) == {"exp_avg", "exp_avg_sq"}


def test_a_pair_of_functions_is_an_optimizer() -> None:
    model = mlp(2, 8)

    def init(params: Any) -> Any:
        return pytree.tree_map(torch.zeros_like, params)

    def update(grads: Any, state: Any, params: Any) -> Any:
        velocity = pytree.tree_map(lambda v, g: 0.9 * v + g, state, grads)
        return pytree.tree_map(lambda v: -0.1 * v, velocity), velocity

    steps = by_trainer(fpipe.train(pipe_of(model), (init, update)), model)
    theirs = by_hand(model, lambda leaves: torch.optim.SGD(leaves, lr=0.1, momentum=0.9))
    assert_same(steps[-1].params, theirs[1])
    with pytest.raises(FpipeError, match="lr: an optimizer that is a pair of functions"):
        fpipe.train(pipe_of(model), (init, update), lr=0.1)


def running_loss(params: Tensor, mean: Tensor, batch: Any) -> Any:
    y = batch["x"] @ params
    mean = 0.9 * mean + 0.1 * y.detach().mean(0)
    return (y - mean).square().mean(), mean, {"mean": mean.sum()}


def test_state_and_aux_of_the_model_come_after() -> None:
    model = mlp(1, 8)
    pipe = fpipe.pipeline(
        running_loss,
        schedule=schedules.one_f_one_b(ranks=1, microbatches=2),
        has_state=True,
        has_aux=True,
        compile=False,
    )
    trainer = fpipe.train(pipe, torch.optim.SGD, lr=0.1)
    weight, mean = model.params[0]["w"], torch.zeros(3, dtype=torch.float64)
    state = trainer.init(weight)
    expected = pipe.step(weight, mean, model.batch)
    found = trainer.step(weight, state, mean, model.batch)
    assert isinstance(found, fpipe.TrainStepStateAux)
    assert_identical(found.model_state, expected.state)
    assert_identical(found.aux, expected.aux)
    assert_same(found.params, weight - 0.1 * expected.grads)
    named = trainer.step(weight, state, model_state=mean, batch=model.batch)
    assert_identical(named, found)


def test_an_ensemble_is_trained_by_vmap() -> None:
    model = mlp(2, 8)
    trainer = fpipe.train(pipe_of(model), torch.optim.AdamW, lr=0.1)
    members = pytree.tree_map(lambda p: torch.stack([p, 2 * p]), model.params)
    rates = torch.tensor([0.1, 0.01], dtype=torch.float64)

    def one(params: Any, rate: Tensor) -> Any:
        state = trainer.init(params)
        _, params, state, _ = trainer.step(params, state, model.batch, lr=rate)
        loss, params, _, _ = trainer.step(params, state, model.batch, lr=rate)
        return loss, params

    together = torch.func.vmap(one)(members, rates)
    for member in range(2):
        params = pytree.tree_map(lambda p, m=member: p[m], members)
        alone = one(params, rates[member])
        assert_same(pytree.tree_map(lambda v, m=member: v[m], together), alone)


def test_a_rate_is_learned_through_a_step() -> None:
    model = mlp(2, 8)
    trainer = fpipe.train(pipe_of(model), torch.optim.SGD, lr=0.1)

    def after(rate: Tensor) -> Tensor:
        state = trainer.init(model.params)
        params = trainer.step(model.params, state, model.batch, lr=rate).params
        return trainer.pipe.value(params, model.batch)

    rate = torch.tensor(0.1, dtype=torch.float64)
    slope = torch.func.grad(after)(rate)
    change = (after(rate + 1e-6) - after(rate - 1e-6)) / 2e-6
    torch.testing.assert_close(slope, change, rtol=1e-6, atol=1e-9)


def test_maml_differentiates_through_a_step() -> None:
    model = mlp(2, 8)
    trainer = fpipe.train(pipe_of(model), torch.optim.SGD, lr=0.1)

    def after(params: Any) -> Tensor:
        state = trainer.init(params)
        return trainer.pipe.value(trainer.step(params, state, model.batch).params, model.batch)

    def plain(params: Any) -> Tensor:
        def loss(params: Any) -> Tensor:
            return model.loss(apply(model.stages, params, model.batch), model.batch)

        grads = torch.func.grad(loss)(params)
        return loss(pytree.tree_map(lambda p, g: p - 0.1 * g, params, grads))

    assert_same(torch.func.grad(after)(model.params), torch.func.grad(plain)(model.params))


def test_a_module_is_trained() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    pipe = fpipe.from_module(
        module,
        loss=lambda y, batch: y.square().mean(),
        schedule=schedules.one_f_one_b(ranks=2, microbatches=2),
        cuts=["1"],
        compile=False,
    )
    params, x = dict(module.named_parameters()), torch.randn(4, 3)
    trainer = fpipe.train(pipe, torch.optim.AdamW, groups={"*.bias": {"weight_decay": 0.0}})
    state = trainer.init(params)
    after = trainer.step(params, state, {"input": x}).params
    decayed = [p for n, p in params.items() if "bias" not in n]
    biases = [p for n, p in params.items() if "bias" in n]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    module(x).square().mean().backward()
    optimizer.step()
    assert_same(after, dict(module.named_parameters()), 1e-5)


def scale(p: Any, x: Tensor) -> Tensor:
    return x * p


def test_wrong_arguments_are_told() -> None:
    model = mlp(2, 8)
    pipe = pipe_of(model)
    trainer = fpipe.train(pipe, torch.optim.SGD, lr=0.1)
    state = trainer.init(model.params)
    with pytest.raises(FpipeError, match=r"pipe=3 is an int"):
        fpipe.train(3, torch.optim.SGD)  # type: ignore[arg-type]
    with pytest.raises(FpipeError, match="argnums='batch'"):
        fpipe.train(fpipe.grad(pipe, "batch"), torch.optim.SGD)
    with pytest.raises(FpipeError, match="max_norm=-1"):
        fpipe.train(pipe, torch.optim.SGD, max_norm=-1)
    with pytest.raises(FpipeError, match="groups has 3: it must map names"):
        fpipe.train(pipe, torch.optim.SGD, groups=[3])  # type: ignore[list-item]
    with pytest.raises(FpipeError, match="groups gives 'a' a float"):
        fpipe.train(pipe, torch.optim.SGD, groups={"a": 0.1})  # type: ignore[dict-item]
    with pytest.raises(FpipeError, match=r"SGD does not take .*unexpected keyword argument 'rate'"):
        trainer.step(model.params, state, model.batch, rate=0.1)
    with pytest.raises(FpipeError, match=r"state=\{\} is a dict: trainer.init\(params\) makes"):
        trainer.step(model.params, {}, model.batch)  # type: ignore[arg-type]
    with pytest.raises(FpipeError, match=r"state\.moments has another structure than params"):
        trainer.step(model.params, state._replace(moments=[1]), model.batch)


def test_stages_that_read_a_key_are_trained() -> None:
    def noisy(p: Tensor, x: Tensor, key: Tensor) -> Tensor:
        return x * p + fpipe.random.normal(key, x.shape, x.dtype)

    stages: list[Any] = [Stage(noisy, reads_key=True), scale]
    pipe = fpipe.pipeline(stages, lambda y, _: y.square().mean(), SCHEDULE, compile=False)
    trainer = fpipe.train(pipe, torch.optim.SGD, lr=0.1)
    params, x, key = [torch.ones(3), torch.ones(3)], torch.ones(8, 3), fpipe.random.key(0)
    result = trainer.step(params, trainer.init(params), x, key=key)
    grads = pipe.step(params, x, key=key).grads
    assert_same(result.params, [p - 0.1 * g for p, g in zip(params, grads, strict=True)], 1e-6)


def test_a_pair_of_functions_may_have_no_state() -> None:
    pair: Any = (
        lambda params: None,
        lambda grads, state, params: (pytree.tree_map(torch.neg, grads), None),
    )
    model = mlp(2, 8)
    pipe = fpipe.pipeline(
        model.stages, model.loss, schedules.gpipe(ranks=2, microbatches=2), compile=False
    )
    trainer = fpipe.train(pipe, pair)
    state = trainer.init(model.params)
    for _ in range(2):
        state = trainer.step(model.params, state, model.batch).state
    assert (int(state.steps), state.moments) == (2, None)
