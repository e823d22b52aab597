"""Transforms of one function with cuts equal torch.func of the function itself.

The function is a small network, which traces at once; a model is in test_cut_model.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jvp, vmap

import fpipe
from fpipe import Schedule, StageError, pytree, schedules
from fpipe.functional.dual import load_rules
from fpipe.program.program import Compute
from fpipe.schedule import Op
from tests.cut_model import make_network, network
from tests.models import assert_identical, assert_same
from tests.transforms.helpers import stacked

load_rules()  # torch warns of its own code when it loads them


def of_four_stages(family: str, microbatches: int) -> Schedule:
    two = schedules.get(family, ranks=2, microbatches=microbatches)
    return two if two.num_stages == 4 else schedules.get(family, ranks=4, microbatches=microbatches)


SCHEDULES = {family: of_four_stages(family, 3) for family in schedules.FAMILIES}
SCHEDULES["zbv"] = of_four_stages("zbv", 4)  # of two sizes
every_schedule = pytest.mark.parametrize("family", SCHEDULES)

WEIGHTS, ROWS = make_network()
NETWORK = fpipe.pipeline(network, schedule=schedules.zbv(ranks=2, microbatches=2), compile=False)


@cache
def made(transform: Callable[[Any], Any]) -> Any:
    return transform(NETWORK)


def moved(transform: Callable[[Any], Any], family: str) -> Any:
    """The transform on a schedule; all of them share its traces."""
    return made(transform).with_schedule(SCHEDULES[family])


def by_both(pipe: Any) -> Any:
    return fpipe.grad(pipe, ("batch", "params"))


def by_batch_alone(pipe: Any) -> Any:
    return fpipe.grad(pipe, "batch")


MEMBERS, SINGLE = stacked(WEIGHTS), pytree.tree_map(lambda leaf: leaf[:, None], ROWS)
VECTOR = pytree.tree_map(torch.cos, WEIGHTS)


def step(params: Any, batch: Any) -> tuple[Tensor, Any]:
    grads, loss = grad_and_value(network)(params, batch)
    return loss, grads


def product(params: Any, batch: Any, vector: Any) -> tuple[Tensor, Any, Any]:
    pushed: Any = jvp(lambda own: step(own, batch), (params,), (vector,))
    return *step(params, batch), pushed[1][1]


@every_schedule
def test_vmap_of_a_cut_function_equals_torch_func(family: str) -> None:
    ensemble = moved(fpipe.vmap, family)
    assert_same(tuple(ensemble.step(MEMBERS, ROWS)), vmap(step, (0, None))(MEMBERS, ROWS))


@every_schedule
def test_hvp_and_jvp_of_a_cut_function_equal_torch_func(family: str) -> None:
    loss, grads, expected = product(WEIGHTS, ROWS, VECTOR)
    found = moved(fpipe.hvp, family).step(WEIGHTS, ROWS, VECTOR)
    assert_same(tuple(found), (loss, grads, expected), 1e-9)
    slope = torch.stack([(grads[name] * VECTOR[name]).sum() for name in "ab"]).sum()
    pushed = moved(fpipe.jvp, family).value(WEIGHTS, ROWS, VECTOR)
    assert_same(tuple(pushed), (loss, slope))


@every_schedule
def test_examples_of_a_cut_function_equal_torch_func(family: str) -> None:
    """The parts of a shared matrix's gradient are added up before anything is squared."""
    loss, grads = moved(fpipe.per_example_grads, family).step(WEIGHTS, ROWS)
    assert_same((loss, grads), vmap(step, (None, 0))(WEIGHTS, SINGLE))
    squares = torch.stack([g.flatten(1).square().sum(1) for g in grads.values()])
    norms = moved(fpipe.per_example_norms, family).step(WEIGHTS, ROWS)
    assert_same(tuple(norms), (loss, squares.sum(0).sqrt()))


@every_schedule
def test_gradients_by_the_batch_sum_over_the_stages_that_read_it(family: str) -> None:
    """Two stages read the inputs."""
    found = moved(by_both, family).step(WEIGHTS, ROWS)
    by_params, by_batch = grad(network, (0, 1))(WEIGHTS, ROWS)
    assert_same(tuple(found), (network(WEIGHTS, ROWS), (by_batch, by_params)))
    assert_same(moved(by_batch_alone, family).step(WEIGHTS, ROWS).grads, by_batch)


def test_gradients_by_the_batch_come_beside_a_state_and_aux() -> None:
    def counting(params: Any, state: Any, batch: Any) -> Any:
        return network(params, batch), {"count": state["count"] + 1}, batch["x"].sum(1)

    pipe = fpipe.pipeline(
        counting, schedule=SCHEDULES["zb_h1"], compile=False, has_state=True, has_aux=True
    )
    found = fpipe.grad(pipe, "batch").step(WEIGHTS, {"count": torch.tensor(0)}, ROWS)
    assert_same(found.grads, grad(network, 1)(WEIGHTS, ROWS))
    assert_same((found.aux, found.state["count"]), (ROWS["x"].sum(1), torch.tensor(3)))


def test_transforms_of_transforms_equal_torch_func() -> None:
    def by_row(function: Any) -> Any:
        return vmap(function, (None, 0))

    def hvp(params: Any, batch: Any) -> Any:
        return product(params, batch, params)

    members = vmap(step, (0, None))
    rows_of_members = fpipe.per_example_grads(fpipe.vmap(NETWORK)).step(MEMBERS, ROWS)
    assert_same(tuple(rows_of_members), by_row(members)(MEMBERS, SINGLE))
    members_of_rows = fpipe.vmap(fpipe.per_example_grads(NETWORK)).step(MEMBERS, ROWS)
    assert_same(tuple(members_of_rows), vmap(by_row(step), (0, None))(MEMBERS, SINGLE))
    norms = fpipe.per_example_norms(fpipe.vmap(NETWORK)).step(MEMBERS, ROWS).norms
    squares = [g.square().sum((2, 3)) for g in rows_of_members.grads.values()]
    assert_same(norms, torch.stack(squares).sum(0).sqrt())
    products = vmap(hvp, (0, None))(MEMBERS, ROWS)
    assert_same(tuple(fpipe.hvp(fpipe.vmap(NETWORK)).step(MEMBERS, ROWS, MEMBERS)), products, 1e-9)
    several = fpipe.vmap(fpipe.hvp(NETWORK), (0, None, 0))
    assert_same(tuple(several.step(MEMBERS, ROWS, MEMBERS)), products, 1e-9)
    found = fpipe.per_example_grads(fpipe.hvp(NETWORK)).step(WEIGHTS, ROWS, WEIGHTS)
    assert_same(tuple(found), by_row(hvp)(WEIGHTS, SINGLE), 1e-9)
    by_batch = fpipe.grad(fpipe.vmap(NETWORK, (0, 0)), "batch").step(MEMBERS, stacked(ROWS))
    assert_same(by_batch.grads, vmap(grad(network, 1))(MEMBERS, stacked(ROWS)))


def test_parts_of_a_gradient_are_freed_after_their_microbatch() -> None:
    pipe = fpipe.per_example_norms(NETWORK.with_schedule(SCHEDULES["one_f_one_b"]))
    program = pipe.programs(WEIGHTS, ROWS)[0]
    done = [i.action.op for i in program.instructions if isinstance(i, Compute)]
    assert [op for op in done if op != Op.F] == [Op.B, Op.REDUCE_GRAD] * 3


def test_leaf_of_the_batch_may_be_mapped() -> None:
    def scaled(params: Any, batch: Any) -> Tensor:
        return network(params, batch) * batch["scale"]

    dims = {"x": 0, "y": 0, "scale": None}
    pipe = fpipe.pipeline(scaled, schedule=SCHEDULES["zb_h1"], in_dims=dims, compile=False)
    scales = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    sweep = fpipe.vmap(pipe, (None, {"x": None, "y": None, "scale": 0}))
    loss, grads = step(WEIGHTS, ROWS)
    found = sweep.step(WEIGHTS, {**ROWS, "scale": scales})
    expected = pytree.tree_map(lambda g: scales[:, None, None] * g, grads)
    assert_same(tuple(found), (scales * loss, expected))


def test_update_in_place_before_a_cut_is_mapped() -> None:
    def shifted(params: Any, batch: Any) -> Tensor:
        h = batch["x"] @ params["a"]
        h[:, 0] += 1.0
        return (fpipe.cut(h) @ params["b"]).square().mean()

    pipe = fpipe.pipeline(shifted, schedule=schedules.zb_h1(ranks=2, microbatches=2), compile=False)
    found = fpipe.vmap(pipe).step(MEMBERS, ROWS).grads
    assert_same(found, vmap(grad(shifted), (0, None))(MEMBERS, ROWS))
    pushed: Any = jvp(lambda own: grad(shifted)(own, ROWS), (WEIGHTS,), (WEIGHTS,))
    assert_same(fpipe.hvp(pipe).step(WEIGHTS, ROWS, WEIGHTS).hvp, pushed[1], 1e-9)


def test_random_numbers_of_members_and_rows() -> None:
    def dropping(params: Any, batch: Any) -> Tensor:
        h = fpipe.cut(torch.dropout(batch["x"] @ params["a"], 0.5, train=True))
        return (h @ params["b"]).square().mean()

    pipe = fpipe.pipeline(
        dropping, schedule=schedules.zb_h1(ranks=2, microbatches=2), compile=False
    )
    twice, row = stacked(WEIGHTS), ROWS["x"][:1].expand(4, 3)
    twice = pytree.tree_map(lambda leaf: leaf[:1].expand_as(leaf), twice)
    torch.manual_seed(0)
    for randomness, equal in (("same", True), ("different", False)):
        first, second = fpipe.vmap(pipe, randomness=randomness).value(twice, ROWS)
        assert bool(first == second) is equal
        rows_of_one = fpipe.per_example_grads(pipe, randomness=randomness)
        first, second, *_ = rows_of_one.value(WEIGHTS, {"x": row, "y": row})
        assert bool(first == second) is equal
    with pytest.raises(StageError, match=r"several members .* randomness= of fpipe\.vmap"):
        fpipe.vmap(pipe).value(twice, ROWS)


def test_call_of_a_cut_function_within_torch_func() -> None:
    ours = vmap(NETWORK.step, (0, None))(MEMBERS, ROWS)
    assert_identical(tuple(ours), tuple(fpipe.vmap(NETWORK).step(MEMBERS, ROWS)))
    with fpipe.use(NETWORK):
        assert_identical(tuple(vmap(fpipe.step, (0, None))(MEMBERS, ROWS)), tuple(ours))
    batches = stacked(ROWS)
    table = vmap(lambda p: vmap(lambda b: NETWORK.value(p, b))(batches))(MEMBERS)
    assert_same(table, vmap(lambda p: vmap(lambda b: network(p, b))(batches))(MEMBERS))
    both = vmap(grad(NETWORK.value, (0, 1)), (0, None))(MEMBERS, ROWS)
    assert_same(both, vmap(grad(network, (0, 1)), (0, None))(MEMBERS, ROWS))

    def bent(value: Any) -> Any:
        return lambda p, b: value(p, b).square().sum()

    assert_same(
        grad(bent(NETWORK.value), (0, 1))(WEIGHTS, ROWS),
        grad(bent(network), (0, 1))(WEIGHTS, ROWS),
    )
    for made, plain, batch in (
        (fpipe.vmap(NETWORK), vmap(network, (0, None)), ROWS),
        (fpipe.vmap(fpipe.per_example_grads(NETWORK)),
         vmap(vmap(network, (None, 0)), (0, None)), SINGLE),
    ):  # fmt: skip
        found = grad(bent(made.value))(MEMBERS, ROWS)
        assert_same(found, grad(bent(plain))(MEMBERS, batch))


def test_readers_of_an_ensemble_are_those_of_a_member() -> None:
    ensemble = fpipe.vmap(NETWORK)
    for pipe, params in ((NETWORK, WEIGHTS), (ensemble, MEMBERS)):
        pipe.value(params, ROWS)
        assert pipe._engine.readers() == {(0, 0): (0,), (0, 1): (1,)}


def test_backward_through_a_value_of_a_cut_function() -> None:
    params, batch = (
        pytree.tree_map(lambda leaf: leaf.clone().requires_grad_(), own) for own in (WEIGHTS, ROWS)
    )
    (2 * NETWORK.value(params, batch)).backward()
    expected = pytree.tree_map(lambda g: 2 * g, grad(network, (0, 1))(WEIGHTS, ROWS))
    assert_same(pytree.tree_map(lambda leaf: leaf.grad, (params, batch)), expected)


def test_keys_and_draws_are_the_same_for_all_members() -> None:
    def noisy(params: Any, batch: Any, key: Tensor) -> Tensor:
        noise = fpipe.random.normal(key, batch["x"].shape, torch.float64)
        return network(params, {**batch, "x": batch["x"] + noise})

    pipe = fpipe.pipeline(noisy, schedule=SCHEDULES["zb_h1"], compile=False, has_key=True)
    key = fpipe.random.key(3)
    found = fpipe.vmap(pipe).step(MEMBERS, ROWS, key)
    for number in range(2):
        alone = pipe.step(pytree.tree_map(lambda p, n=number: p[n], MEMBERS), ROWS, key)
        assert_same(pytree.tree_map(lambda leaf, n=number: leaf[n], tuple(found)), tuple(alone))


@pytest.mark.inductor
def test_compiled_transforms_of_a_cut_function() -> None:
    """Derivatives along a vector are compiled in modules/test_transforms.py."""
    params, batch = make_network(torch.float32)

    def tied(own: Any, batch: Any) -> Tensor:
        h = fpipe.cut(torch.tanh(batch["x"] @ own["a"]))
        return (h @ own["a"] - batch["y"]).square().mean()

    schedule = schedules.zb_h1(ranks=2, microbatches=1)
    compiled, plain = (
        fpipe.pipeline(tied, schedule=schedule, compile=flag) for flag in (True, False)
    )
    ours, theirs = (
        fpipe.per_example_norms(fpipe.vmap(pipe)).step(stacked(params), batch)
        for pipe in (compiled, plain)
    )
    assert_same(tuple(ours), tuple(theirs), 1e-4)


# ── refusals ────────────────────────────────────────────────────────────────────────────────────


def test_gauss_newton_is_refused_because_there_is_no_output() -> None:
    with pytest.raises(StageError, match=r"is one function, which returns the loss alone: pass"):
        fpipe.ggnvp(NETWORK)
