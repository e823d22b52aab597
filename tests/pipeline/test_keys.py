"""A step with a key draws the same numbers whatever runs it, and those of the plain function."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from fpipe import BatchError, FpipeError, Schedule, Stage, StageError, random, schedules
from fpipe.program.program import Send
from tests import keyed_model as keyed
from tests.models import assert_identical, assert_same, mean_square, mlp, rand

KEY = random.key(42)


@cache
def chain(schedule: Schedule, **options: Any) -> fpipe.Pipeline:
    options = {"compile": False} | options
    return fpipe.pipeline(keyed.stages(schedule.num_stages), mean_square, schedule, **options)


@cache
def function(schedule: Schedule, **options: Any) -> fpipe.Pipeline:
    return fpipe.pipeline(
        keyed.loss_fn, schedule=schedule, has_key=True, **({"compile": False} | options)
    )


def single(**options: Any) -> fpipe.Pipeline:
    """One stage alone."""
    stages, schedule = (
        [Stage(keyed.first, reads_key=True)],
        schedules.gpipe(ranks=1, microbatches=2),
    )
    return fpipe.pipeline(stages, mean_square, schedule, **({"compile": False} | options))


def only(params: Any, batch: Any, key: Tensor) -> Tensor:
    """What `single` computes of a microbatch."""
    return mean_square(keyed.first(params[0], batch, random.fold_in(key, 0)), batch)


def params_and_batch(rows: int = 7) -> tuple[Any, Any]:
    model = mlp(4, rows)
    first = {"x": model.batch["x"], "y": model.batch["y"]}
    return model.params, first


SCHEDULES = [
    schedules.zb_h1(ranks=4, microbatches=3),
    schedules.zbv(ranks=2, microbatches=3),
]


@pytest.mark.parametrize(("make", "one"), [(chain, keyed.chained), (function, keyed.loss_fn)])
def test_equal_to_the_plain_function_everywhere(make: Any, one: Any) -> None:
    """Microbatches of two sizes, on schedules and remat policies."""
    params, batch = params_and_batch()
    expected = keyed.unpipelined(one, params, batch, KEY, 3)
    found = []
    for schedule, remat in zip(SCHEDULES, ("none", "full"), strict=True):
        found.append(make(schedule, remat=remat).step(params, batch, KEY))
        assert_same(found[-1], expected)
    for other in found:
        assert_identical(other.loss, found[0].loss)


@pytest.mark.parametrize("make", [chain, function])
def test_another_key_draws_apart_and_the_same_key_again(make: Any) -> None:
    params, batch = params_and_batch()
    pipe = make(SCHEDULES[0], remat="none")
    once, again = pipe.step(params, batch, KEY), pipe.step(params, batch, key=KEY)
    assert_identical(again, once)
    other = pipe.step(params, batch, random.key(43))
    assert not torch.equal(other.loss, once.loss)
    assert_identical(pipe.value(params, batch, KEY), once.loss)
    with fpipe.use(pipe):
        assert_identical(fpipe.step(params, batch, KEY), once)


def test_keys_of_microbatches_and_stages() -> None:
    """The key itself comes out: stages of one function have keys of their own."""

    def keys(p: Any, x: Any, key: Tensor) -> Any:
        return {**x, f"key{len(x)}": key[None]}

    schedule = schedules.gpipe(ranks=2, microbatches=3)
    stages = [Stage(keys, reads_key=True)] * 2
    pipe = fpipe.pipeline(stages, lambda y, _: y["x"].sum(), schedule, compile=False)
    found = pipe.forward([None, None], {"x": torch.zeros(3)}, KEY)
    for stage, name in enumerate(("key1", "key2")):
        for m, own in enumerate(found[name]):
            assert torch.equal(own, random.fold_in(random.fold_in(KEY, m), stage))


def test_key_travels_in_no_message() -> None:
    params, batch = params_and_batch()
    for make in (chain, function):
        programs = make(SCHEDULES[0], remat="none").programs(params, batch)
        sent = [i.message for program in programs for i in program.instructions if type(i) is Send]
        assert sent and all(s.dtype == torch.float64 for message in sent for s in message.specs)
    assert "key of microbatch 2" in str(programs[0])


def test_programs_and_profiles_take_the_key_of_a_step() -> None:
    pipe, (params, batch) = chain(SCHEDULES[0]), params_and_batch()
    placed, named = pipe.programs(params, batch, KEY), pipe.programs(params, batch, key=KEY)
    assert list(map(str, placed)) == list(map(str, named))
    with pytest.raises(fpipe.FpipeError, match="key is"):
        pipe.programs(params, batch, batch)
    forwards = fpipe.profile(pipe, params, batch, KEY, steps=1).f
    assert isinstance(forwards, tuple) and min(forwards) > 0


def test_a_history_of_autograd() -> None:
    params, batch = mlp(1, 4).params, mlp(1, 4).batch
    pipe = single()
    own = [{k: v.clone().requires_grad_() for k, v in part.items()} for part in params]
    loss = pipe.value(own, batch, KEY)
    loss.backward()
    step = pipe.step(params, batch, KEY)
    assert_identical([{k: v.grad for k, v in part.items()} for part in own], step.grads)


@pytest.mark.inductor
def test_compiled() -> None:
    model = mlp(1, 4)
    expected = keyed.unpipelined(only, model.params, model.batch, KEY, 2)
    assert_same(single(remat="full", compile=True).step(model.params, model.batch, KEY), expected)


# ── transforms ──────────────────────────────────────────────────────────────────────────────────


def test_members_of_an_ensemble_share_a_key() -> None:
    model = mlp(1, 4)
    double = [{k: torch.stack([v, -v]) for k, v in part.items()} for part in model.params]
    both = fpipe.vmap(single()).step(double, model.batch, KEY)
    for member, sign in enumerate((1, -1)):
        own = [{k: sign * v for k, v in part.items()} for part in model.params]
        alone = keyed.unpipelined(only, own, model.batch, KEY, 2)
        assert_same(both.loss[member], alone.loss)
        assert_same([{k: v[member] for k, v in part.items()} for part in both.grads], alone.grads)


def test_directional_derivatives_take_a_key() -> None:
    model = mlp(1, 4)
    vector = [{k: rand(*v.shape) for k, v in part.items()} for part in model.params]
    pipe = fpipe.hvp(single())
    found = pipe.step(model.params, model.batch, vector, KEY)
    expected = keyed.unpipelined(only, model.params, model.batch, KEY, 2)
    assert_same(fpipe.Step(found.loss, found.grads), expected)
    assert_same(pipe.value(model.params, model.batch, vector, KEY).loss, expected.loss)


def test_rows_take_a_key() -> None:
    def stage(p: Tensor, x: Tensor, key: Tensor) -> Tensor:
        return x * p * random.uniform(key, (3,), torch.float64)

    schedule = schedules.gpipe(ranks=1, microbatches=2)
    pipe = fpipe.pipeline(
        [Stage(stage, reads_key=True)], lambda y, _: y.mean(), schedule, compile=False
    )
    weight, x = rand(3), rand(4, 3)
    norms = fpipe.per_example_norms(pipe).step([weight], x, KEY)
    factor = [
        random.uniform(random.fold_in(random.fold_in(KEY, m), 0), (3,), torch.float64)
        for m in (0, 0, 1, 1)
    ]
    assert_same(norms.loss, (x * weight * torch.stack(factor)).mean(1))
    assert_same(norms.norms, (x * torch.stack(factor) / 3).norm(dim=1))


def test_within_transforms_of_torch() -> None:
    model = mlp(1, 4)
    pipe = single()
    expected = keyed.unpipelined(only, model.params, model.batch, KEY, 2)
    grads = torch.func.grad(lambda own: pipe.value(own, model.batch, KEY))(model.params)
    assert_same(grads, expected.grads)
    stacked = [{k: torch.stack([v, v]) for k, v in part.items()} for part in model.params]
    losses = torch.func.vmap(lambda own: pipe.value(own, model.batch, KEY))(stacked)
    assert_same(losses, expected.loss.expand(2))
    with pytest.raises(BatchError, match=r"key is mapped by a transform of torch\.func"):
        torch.func.vmap(lambda key: pipe.value(model.params, model.batch, key))(random.split(KEY))


# ── refusals ────────────────────────────────────────────────────────────────────────────────────


def test_refusals() -> None:
    params, batch = params_and_batch()
    pipe = chain(SCHEDULES[0], remat="none")
    with pytest.raises(BatchError, match=r"key=None, but the stages read a key: pass key=fpipe"):
        pipe.step(params, batch)
    with pytest.raises(FpipeError, match="key is a float32 tensor"):
        pipe.step(params, batch, torch.zeros(2))
    model = mlp(4, 7)
    plain = fpipe.pipeline(model.stages, mean_square, SCHEDULES[0], compile=False)
    with pytest.raises(BatchError, match="key is given, but nothing reads it"):
        plain.step(params, batch, KEY)
    with pytest.raises(StageError, match="has_key=True is for one function"):
        fpipe.pipeline(model.stages, mean_square, SCHEDULES[0], has_key=True)
