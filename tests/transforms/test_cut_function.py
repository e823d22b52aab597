"""Transforms of one function that is cut: what torch.func gives of the function itself.

The model has a skip value, a table that the first stage and the last one read, a parameter that
nothing reads, and one that is no number to train.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jvp, vmap

import fpipe
from fpipe import BatchError, StageError, schedules, tree
from fpipe.transforms.plain import differentiable_twice
from tests.cut_model import (
    IN_DIMS,
    language_model,
    make_batch,
    make_network,
    make_params,
    network,
)
from tests.models import assert_identical, assert_same

PARAMS = make_params()
TRAINED = {name: value for name, value in PARAMS.items() if name != "count"}
BATCH = {n: v[:6] if n != "visible" else v for n, v in make_batch().items()}
VECTOR = tree.tree_map(torch.cos, TRAINED)
SCHEDULES = {
    "zb_h1": schedules.zb_h1(ranks=4, microbatches=3),
    "zbv": schedules.zbv(ranks=2, microbatches=4),  # of two sizes
    "one_f_one_b": schedules.one_f_one_b(ranks=4, microbatches=3),
    "interleaved_1f1b": schedules.interleaved_1f1b(ranks=2, microbatches=2),
}
every_schedule = pytest.mark.parametrize("family", SCHEDULES)


def pipe_of(family: str, **options: Any) -> fpipe.Pipeline:
    options = {"in_dims": IN_DIMS, "compile": False, **options}
    return fpipe.pipeline(language_model, schedule=SCHEDULES[family], **options)


PIPE = pipe_of("zbv")


def whole(params: Any, batch: Any) -> Tensor:
    return language_model({**PARAMS, **params}, batch)


def step(params: Any, batch: Any) -> tuple[Tensor, Any]:
    grads, loss = grad_and_value(whole)(params, batch)
    return loss, grads


def product(params: Any, batch: Any, vector: Any) -> Any:
    with differentiable_twice():
        pushed: Any = jvp(lambda own: grad(whole)(own, batch), (params,), (vector,))
    return pushed[1]


def stacked(value: Any, dim: int = 0) -> Any:
    """Two members."""
    return tree.tree_map(lambda leaf: torch.stack([leaf, 0.9 * leaf], dim), value)


@every_schedule
def test_vmap(family: str) -> None:
    """Members along a dimension of their own, and a whole number that they share."""
    ensemble = fpipe.vmap(pipe_of(family), ({**dict.fromkeys(TRAINED, -1), "count": None}, None))
    members = {**stacked(TRAINED, -1), "count": PARAMS["count"]}
    loss, grads = ensemble.step(members, BATCH)
    assert grads.pop("count") is None
    expected, moved = vmap(step, (-1, None))(stacked(TRAINED, -1), BATCH)
    assert_same((loss, grads), (expected, tree.tree_map(lambda g: g.movedim(0, -1), moved)))
    assert_same(ensemble.value(members, BATCH), expected)


@every_schedule
def test_hvp(family: str) -> None:
    found = fpipe.hvp(pipe_of(family)).step(PARAMS, BATCH, {**VECTOR, "count": None})
    assert found.grads.pop("count") is None
    assert found.hvp.pop("count") is None
    expected = (*step(TRAINED, BATCH), product(TRAINED, BATCH, VECTOR))
    assert_same(tuple(found), expected, 1e-9)


def test_jvp() -> None:
    loss, grads = step(TRAINED, BATCH)
    pairs = zip(*(tree.flatten(side)[0] for side in (grads, VECTOR)), strict=True)
    slope = torch.stack([(g * v).sum() for g, v in pairs]).sum()
    found = fpipe.jvp(pipe_of("zb_h1")).value(TRAINED, BATCH, VECTOR)
    assert_same(tuple(found), (loss, slope))


def rows() -> Any:
    """The batch, each row a batch of one along a new first dimension."""
    return {name: leaf if name == "visible" else leaf[:, None] for name, leaf in BATCH.items()}


@every_schedule
def test_per_example(family: str) -> None:
    """The parts of the table's gradient are added up before anything is squared."""
    pipe = pipe_of(family)
    loss, grads = fpipe.per_example_grads(pipe).step(PARAMS, BATCH)
    assert grads.pop("count") is None
    assert_same((loss, grads), vmap(step, (None, IN_DIMS))(TRAINED, rows()))
    squares = [g.flatten(1).square().sum(1) for g in tree.flatten(grads)[0]]
    norms = fpipe.per_example_norms(pipe).step(PARAMS, BATCH)
    assert_same(tuple(norms), (loss, torch.stack(squares).sum(0).sqrt()))


# ── of a small network, which traces at once ────────────────────────────────────────────────────

WEIGHTS, ROWS = make_network()
NETWORK = fpipe.pipeline(network, schedule=schedules.zbv(ranks=2, microbatches=2), compile=False)
MEMBERS, SINGLE = stacked(WEIGHTS), tree.tree_map(lambda leaf: leaf[:, None], ROWS)


def network_step(params: Any, batch: Any) -> tuple[Tensor, Any]:
    grads, loss = grad_and_value(network)(params, batch)
    return loss, grads


@pytest.mark.parametrize("family", ["zb_h1", "zbv", "one_f_one_b"])
def test_gradients_by_the_batch(family: str) -> None:
    """Of inputs that two stages read."""
    pipe = NETWORK.with_schedule(SCHEDULES[family])
    found = fpipe.grad(pipe, ("batch", "params")).step(WEIGHTS, ROWS)
    by_params, by_batch = grad(network, (0, 1))(WEIGHTS, ROWS)
    assert_same(tuple(found), (network(WEIGHTS, ROWS), (by_batch, by_params)))
    assert_same(fpipe.grad(pipe, "batch").step(WEIGHTS, ROWS).grads, by_batch)


def test_gradients_by_the_batch_beside_a_state_and_aux() -> None:
    def counting(params: Any, state: Any, batch: Any) -> Any:
        return network(params, batch), {"count": state["count"] + 1}, batch["x"].sum(1)

    pipe = fpipe.pipeline(
        counting, schedule=SCHEDULES["zb_h1"], compile=False, has_state=True, has_aux=True
    )
    found = fpipe.grad(pipe, "batch").step(WEIGHTS, {"count": torch.tensor(0)}, ROWS)
    assert_same(found.grads, grad(network, 1)(WEIGHTS, ROWS))
    assert_same((found.aux, found.state["count"]), (ROWS["x"].sum(1), torch.tensor(3)))


def test_transforms_of_transforms() -> None:
    def by_row(function: Any) -> Any:
        return vmap(function, (None, 0))

    def hvp(params: Any, batch: Any) -> Any:
        pushed: Any = jvp(lambda own: network_step(own, batch), (params,), (params,))
        return *network_step(params, batch), pushed[1][1]

    members = vmap(network_step, (0, None))
    rows_of_members = fpipe.per_example_grads(fpipe.vmap(NETWORK)).step(MEMBERS, ROWS)
    assert_same(tuple(rows_of_members), by_row(members)(MEMBERS, SINGLE))
    members_of_rows = fpipe.vmap(fpipe.per_example_grads(NETWORK)).step(MEMBERS, ROWS)
    assert_same(tuple(members_of_rows), vmap(by_row(network_step), (0, None))(MEMBERS, SINGLE))
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


def test_within_transforms_of_torch() -> None:
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
        assert pipe.readers() == {(0, 0): (0,), (0, 1): (1,)}


def test_within_autograd() -> None:
    params, batch = (
        tree.tree_map(lambda leaf: leaf.clone().requires_grad_(), own) for own in (WEIGHTS, ROWS)
    )
    (2 * NETWORK.value(params, batch)).backward()
    expected = tree.tree_map(lambda g: 2 * g, grad(network, (0, 1))(WEIGHTS, ROWS))
    assert_same(tree.tree_map(lambda leaf: leaf.grad, (params, batch)), expected)


def test_keys_and_draws_are_the_same_for_all_members() -> None:
    def noisy(params: Any, batch: Any, key: Tensor) -> Tensor:
        noise = fpipe.random.normal(key, batch["x"].shape, torch.float64)
        return network(params, {**batch, "x": batch["x"] + noise})

    pipe = fpipe.pipeline(noisy, schedule=SCHEDULES["zb_h1"], compile=False, has_key=True)
    key = fpipe.random.key(3)
    found = fpipe.vmap(pipe).step(MEMBERS, ROWS, key)
    for number in range(2):
        alone = pipe.step(tree.tree_map(lambda p, n=number: p[n], MEMBERS), ROWS, key)
        assert_same(tree.tree_map(lambda leaf, n=number: leaf[n], tuple(found)), tuple(alone))


@pytest.mark.inductor
def test_compiled_in_float32() -> None:
    params, batch = make_network(torch.float32)

    def tied(own: Any, batch: Any) -> Tensor:
        h = fpipe.cut(torch.tanh(batch["x"] @ own["a"]))
        return (h @ own["a"] - batch["y"]).square().mean()

    schedule = schedules.zb_h1(ranks=2, microbatches=1)
    compiled, plain = (
        fpipe.pipeline(tied, schedule=schedule, compile=flag) for flag in (True, False)
    )
    for call in (
        lambda pipe: fpipe.hvp(pipe).step(params, batch, params),
        lambda pipe: fpipe.per_example_norms(fpipe.vmap(pipe)).step(stacked(params), batch),
    ):
        assert_same(tuple(call(compiled)), tuple(call(plain)), 1e-4)


# ── refusals ────────────────────────────────────────────────────────────────────────────────────


def test_gauss_newton_is_refused_because_there_is_no_output() -> None:
    with pytest.raises(StageError, match=r"is one function, which returns the loss alone: pass"):
        fpipe.ggnvp(PIPE)


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(
        BatchError, match=r"params\['table'\] of shape \(11, 8\): it must be the dim"
    ):
        fpipe.vmap(PIPE, ({**dict.fromkeys(PARAMS), "table": 2}, None)).step(PARAMS, BATCH)
    with pytest.raises(BatchError, match=r"vector\['unused'\] is torch.float64 of shape \(11, 8\)"):
        fpipe.hvp(PIPE).step(TRAINED, BATCH, {**VECTOR, "unused": VECTOR["table"]})
    with pytest.raises(BatchError, match=r"vector is .*, but params is .*: a vector has the struc"):
        fpipe.hvp(PIPE).step(TRAINED, BATCH, {"table": VECTOR["table"]})


@pytest.mark.parametrize("options", [{"has_aux": True}, {"has_state": True}])
def test_what_comes_beside_the_loss_is_refused(options: Any) -> None:
    pipe = pipe_of("zb_h1", **options)
    for transform in (fpipe.vmap, fpipe.hvp, fpipe.per_example_grads):
        with pytest.raises(StageError, match=f"transform a pipeline without {next(iter(options))}"):
            transform(pipe)
