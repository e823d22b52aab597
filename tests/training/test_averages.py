"""Averages of parameters over the steps, and steps that are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

import fpipe
from fpipe import FpipeError, pytree
from tests.models import assert_identical, assert_same, mlp, pipe_of

EMA: Final = 0.9
STEPS: Final = 3


def copies(tree: Any) -> Any:
    return pytree.tree_map(torch.clone, tree)


def by_torch(history: list[Any]) -> Any:
    """torch's average over parameters, the first of which begin it."""
    average = copies(history[0])
    move = get_ema_multi_avg_fn(EMA)
    for params in history[1:]:
        leaves = [[leaf.detach() for leaf in pytree.flatten(t)[0]] for t in (average, params)]
        move(leaves[0], leaves[1], 0)
    return average


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.05}, {"max_norm": 0.05, "clip": "wait"}])
def test_the_average_is_that_of_torch(options: dict[str, Any]) -> None:
    model = mlp(2, 8)
    pipe = pipe_of(model)
    trainer = fpipe.train(pipe, torch.optim.AdamW, lr=0.1, ema=EMA, **options)
    plain = fpipe.train(pipe, torch.optim.AdamW, lr=0.1, **options)
    params, state = model.params, trainer.init(model.params)
    other, other_state = model.params, plain.init(model.params)
    history: list[Any] = [params]
    assert_identical(trainer.averages(params, state), params)
    for _ in range(STEPS):
        _, params, state, _ = trainer.step(params, state, model.batch)
        _, other, other_state, _ = plain.step(other, other_state, model.batch)
        history.append(params)
    assert_identical(params, other)
    assert_same(trainer.averages(params, state), by_torch(history), 1e-12)


def test_averages_are_donated_mapped_and_saved(tmp_path: Path) -> None:
    model = mlp(2, 8)
    trainer = fpipe.train(pipe_of(model), torch.optim.SGD, lr=0.1, ema=EMA)
    writing = fpipe.train(pipe_of(model), torch.optim.SGD, lr=0.1, ema=EMA, donate=True)
    params, state = model.params, trainer.init(model.params)
    own: Any = copies(model.params)
    own_state = writing.init(own)
    for _ in range(STEPS):
        _, params, state, _ = trainer.step(params, state, model.batch)
        writing.step(own, own_state, model.batch)
    assert_identical([own, own_state], [params, state])
    trainer.save(tmp_path / "last", params, state)
    read = trainer.load(tmp_path / "last")
    assert_identical(trainer.averages(read.params, read.state), trainer.averages(params, state))
    ensemble = fpipe.vmap(trainer)
    members = pytree.tree_map(lambda leaf: torch.stack([leaf, leaf]), model.params)
    after = ensemble.init(members)
    for _ in range(STEPS):
        _, members, after, _ = ensemble.step(members, after, model.batch)
    first = pytree.tree_map(lambda leaf: leaf[0], ensemble.averages(members, after))
    assert_same(first, trainer.averages(params, state), 1e-12)


def test_what_is_frozen_has_no_average() -> None:
    model = mlp(2, 8)
    trainer = fpipe.train(
        pipe_of(model, trainable=[True, False]), torch.optim.AdamW, lr=0.1, ema=EMA
    )
    state = trainer.init(model.params)
    _, params, state, _ = trainer.step(model.params, state, model.batch)
    averages = trainer.averages(params, state)
    assert averages[1] == params[1]
    assert not torch.equal(*(pytree.flatten(tree[0])[0][0] for tree in (averages, params)))


@pytest.mark.parametrize("options", [{}, {"clip": "wait"}, {"donate": True}, {"max_norm": 1.0}])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_step_that_is_not_finite_is_left_out(options: dict[str, Any], number: float) -> None:
    model = mlp(2, 8)
    trainer = fpipe.train(pipe_of(model), torch.optim.AdamW, lr=0.1, skip_nonfinite=True, **options)
    params: Any = copies(model.params)
    state = trainer.init(params)
    _, params, state, norm = trainer.step(params, state, model.batch)
    assert norm is not None
    assert norm.isfinite()
    before = copies([params, state])
    wrong = pytree.tree_map(
        lambda leaf: leaf * number if leaf.is_floating_point() else leaf, model.batch
    )
    loss, params, state, norm = trainer.step(params, state, wrong)
    assert not loss.isfinite()
    assert norm is not None
    assert not norm.isfinite()
    assert_identical([params, state], before)
    after = trainer.step(params, state, model.batch)
    assert int(after.state.steps) == 2
    assert all(leaf.isfinite().all() for leaf in pytree.flatten(after.params)[0])


def test_without_it_the_bits_are_the_same() -> None:
    model = mlp(2, 8)
    steps = [
        fpipe.train(pipe_of(model), torch.optim.AdamW, lr=0.1, skip_nonfinite=skips)
        for skips in (True, False)
    ]
    one, other = (t.step(model.params, t.init(model.params), model.batch) for t in steps)
    assert_identical(one[:3], other[:3])


def test_wrong_choices_are_told() -> None:
    model = mlp(2, 8)
    pipe = pipe_of(model)
    wrong: Any
    for wrong in (1.0, -0.1, "0.9", True):
        with pytest.raises(FpipeError, match=r"ema=.* must be a number from 0 to 1"):
            fpipe.train(pipe, torch.optim.SGD, lr=0.1, ema=wrong)
    pair: Any = (lambda params: params, lambda grads, state, params: (grads, state))
    with pytest.raises(FpipeError, match="ema: an optimizer that is a pair of functions"):
        fpipe.train(pipe, pair, ema=EMA)
    plain = fpipe.train(pipe, torch.optim.SGD, lr=0.1)
    averaging = fpipe.train(pipe, torch.optim.SGD, lr=0.1, ema=EMA)
    state = plain.init(model.params)
    with pytest.raises(FpipeError, match=r"trainer\.averages of a trainer that keeps none"):
        plain.averages(model.params, state)
    with pytest.raises(FpipeError, match=r"has no 'ema'"):
        averaging.step(model.params, state, model.batch)
    skipping = fpipe.train(pipe, torch.optim.SGD, lr=0.1, skip_nonfinite=True)
    with pytest.raises(FpipeError, match="skip_nonfinite=True, which leaves out the step of"):
        fpipe.vmap(skipping)
