"""What is the caller's stays the caller's, and what a step hands out becomes the caller's."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fpipe import pytree
from tests.models import assert_identical, check, gpt, mean_square, mlp, plain_pipeline, rand

X, Y = rand(4, 3), rand(4, 3).flip(0)
BATCH = {"x": X, "y": Y}


class Case(NamedTuple):
    """A chain of stages whose gradients or outputs are tempted to share memory."""

    stages: list[Any]
    params: list[Any]
    loss: Any = mean_square


def square(y: Tensor, _: Any) -> Tensor:
    return y.square().sum()


def total(y: Tensor, _: Any) -> Tensor:
    return y.sum()


CASES = {
    "cotangent is the gradient": Case(
        [lambda b, x: x["x"] + b, lambda b, x: x + b], [rand(3), rand(3)]
    ),
    "of full shape": Case([lambda b, x: x["x"][:2] + b], [rand(2, 3)], square),
    "two with one gradient": Case([lambda p, x: x["x"] + p[0] + p[1]], [(rand(3), rand(3))]),
    "expanded": Case([lambda p, x: p[0] + p[1].t().sum(0)], [(rand(3), rand(3, 2))], total),
    "the seed itself": Case([lambda p, x: p], [torch.tensor(2.0, dtype=torch.float64)], total),
    "views of one": Case([lambda p, x: torch.cat(p)], [(rand(2), rand(2).flip(0))], square),
    "a param as output": Case([lambda p, x: p, lambda p, x: x * p], [rand(3), rand(3)], total),
    "a batch leaf": Case([lambda p, x: (p * x["x"]).sum(0)], [rand(1, 3)], total),
    "transposed": Case([lambda p, x: x["x"] @ p.t()], [rand(3, 3)]),
    "unused": Case([lambda p, x: x["x"] * p[0]], [(rand(3), rand(3), rand(3))]),
    "an upstream gradient": Case(
        [lambda p, x: x["x"] * p, lambda p, x: torch.tanh(x + p)], [rand(3), rand(4, 3)[:1]]
    ),
}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_results_share_no_memory(name: str, microbatches: int) -> None:
    check_ownership(CASES[name], microbatches, compile=False)


@pytest.mark.inductor
def test_compiled_results_share_no_memory() -> None:
    # Inductor removes a copy where it believes that nobody can tell.
    for name in ("two with one gradient", "views of one"):
        check_ownership(CASES[name], 1, compile=True)


def check_ownership(case: Case, microbatches: int, **options: Any) -> None:
    pipe = plain_pipeline(case.stages, case.loss, microbatches, **options)
    given = pytree.flatten((case.params, BATCH))[0]
    before = [leaf.clone() for leaf in given]
    step = pipe.step(case.params, BATCH)
    results = pytree.flatten(step)[0]
    memory = [leaf.untyped_storage().data_ptr() for leaf in (*results, *given)]
    assert len(set(memory)) == len(memory)

    expected = [leaf.clone() for leaf in results]
    for leaf in results:
        leaf.mul_(7).add_(1)
    assert_identical(given, before)
    again = pipe.step(case.params, BATCH)
    assert_identical(pytree.flatten(again)[0], expected)


def test_gradients_survive_the_next_step() -> None:
    model = gpt(2, 4)
    pipe = plain_pipeline(model.stages, model.loss)
    first = pipe.step(model.params, model.batch)
    kept = pytree.tree_map(torch.clone, first)
    other = pytree.tree_map(lambda leaf: leaf * 2, model.params)
    pipe.step(other, model.batch)
    assert_identical(first, kept)


def test_nothing_that_is_passed_in_changes() -> None:
    model = gpt(3, 5)
    before = pytree.tree_map(torch.clone, (model.params, model.batch))
    pipe = plain_pipeline(model.stages, model.loss, microbatches=2)
    pipe.step(model.params, model.batch)
    pipe.value(model.params, model.batch)
    pipe.forward(model.params, model.batch)
    assert_identical((model.params, model.batch), before)


def test_step_is_free_of_autograd_history() -> None:
    model = mlp(2, 4)
    params = pytree.tree_map(lambda leaf: leaf.clone().requires_grad_(), model.params)
    batch = pytree.tree_map(lambda leaf: leaf.clone().requires_grad_(), model.batch)
    step = check(model.stages, params, batch)
    assert not any(leaf.requires_grad for leaf in pytree.flatten(step)[0])
    assert all(leaf.grad is None for leaf in pytree.flatten((params, batch))[0])


def test_module_parameters_can_be_passed() -> None:
    model = mlp(2, 4)
    params = pytree.tree_map(torch.nn.Parameter, model.params)
    check(model.stages, params, model.batch)


def test_output_of_forward_is_the_callers() -> None:
    scale = rand(3)
    pipe = plain_pipeline([lambda p, x: {"h": x["x"] * p, "p": p, "x": x["x"]}], microbatches=1)
    expected = scale.clone(), X.clone()
    for out_dims in ({"h": 0, "p": None, "x": None}, 0):
        output = pipe.forward([scale], BATCH, out_dims=out_dims)
        for leaf in output.values():
            leaf.zero_()
    assert_identical((scale, X), expected)


def test_a_change_of_the_callers_between_steps_is_seen() -> None:
    model = mlp(1, 2)
    pipe = plain_pipeline(model.stages)
    before = pipe.step(model.params, model.batch)
    for leaf in model.params[0].values():
        leaf.add_(1)
    changed = pipe.step(model.params, model.batch)
    assert not changed.loss.equal(before.loss)
    check(model.stages, model.params, model.batch)


def test_closed_over_tensor_is_read_at_each_step() -> None:
    scale = torch.ones(3, dtype=torch.float64)
    pipe = plain_pipeline([lambda p, x: x["x"] * p * scale])
    before = pipe.step([rand(3)], BATCH).loss
    scale.mul_(2)
    after = pipe.step([rand(3)], BATCH).loss
    assert not after.equal(before)
