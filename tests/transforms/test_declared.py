"""Transforms of pipelines that declare more than a loss: a weight, aux, a state, what is trained.

Sums of microbatches are over sums of weights, which differ from row to row and member to member.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import grad, grad_and_value, jvp, stack_module_state, vjp, vmap

import fpipe
from fpipe import BatchError, Schedule, StageError, pytree, schedules
from fpipe.functional.dual import load_rules
from fpipe.nn import BatchStats
from tests import returns_model, state_model
from tests.distributed.crew import Crew, values
from tests.models import apply, assert_identical, assert_same, mlp
from tests.transforms.helpers import norms_of, stacked

ROWS, MICROBATCHES = 6, 3
FAMILIES = list(schedules.FAMILIES)


# ── stages with a loss that weighs every row ────────────────────────────────────────────────────


def weighted(y: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Rows count by their weight, of which the first few have little."""
    own = (y - batch["y"]).square().mean(-1)
    return (batch["weight"] * own).sum(), batch["weight"].sum()


def divided(heads: tuple[Tensor, Tensor]) -> Tensor:
    return heads[0] / heads[1]


class Given:
    """A model of so many stages with this loss."""

    def __init__(self, stages: int) -> None:
        model = mlp(stages, ROWS)
        self.stages, self.params = model.stages, model.params
        self.batch = {**model.batch, "weight": torch.arange(1, ROWS + 1).double()}
        self.vector = pytree.tree_map(torch.cos, self.params)

    def loss(self, params: Any, batch: Any) -> Tensor:
        return divided(weighted(apply(self.stages, params, batch), batch))

    def step(self, params: Any, batch: Any) -> tuple[Tensor, Any]:
        grads, loss = grad_and_value(self.loss)(params, batch)
        return loss, grads

    def product(self, params: Any, batch: Any, vector: Any) -> tuple[Tensor, Any, Any]:
        pushed: Any = jvp(lambda own: self.step(own, batch), (params,), (vector,))
        (loss, grads), (_, found) = pushed
        return loss, grads, found

    def gauss_newton(self) -> tuple[Tensor, Any, Any]:
        def output(params: Any) -> Any:
            return apply(self.stages, params, self.batch)

        def of_output(y: Tensor) -> Tensor:
            return divided(weighted(y, self.batch))

        pushed: Any = jvp(output, (self.params,), (self.vector,))
        bent: Any = jvp(grad(of_output), pushed[:1], pushed[1:])
        return *self.step(self.params, self.batch), vjp(output, self.params)[1](bent[1])[0]

    def by_row(self, function: Callable[[Any, Any], Any], params: Any) -> Any:
        rows = pytree.tree_map(lambda leaf: leaf[:, None], self.batch)
        return vmap(function, (None, 0))(params, rows)


Called = Callable[[Any, Given], Any]
CASES: dict[str, tuple[Callable[[Any], Any], Called, Callable[[Given], Any]]] = {
    "vmap": (
        fpipe.vmap,
        lambda pipe, own: pipe.step(stacked(own.params), own.batch),
        lambda own: vmap(own.step, (0, None))(stacked(own.params), own.batch),
    ),
    "vmap with a weight for each member": (
        lambda pipe: fpipe.vmap(pipe, (0, {"x": None, "y": None, "weight": 0})),
        lambda pipe, own: pipe.step(stacked(own.params), weights_of_members(own.batch)),
        lambda own: vmap(own.step, (0, {"x": None, "y": None, "weight": 0}))(
            stacked(own.params), weights_of_members(own.batch)
        ),
    ),
    "per_example_grads": (
        fpipe.per_example_grads,
        lambda pipe, own: pipe.step(own.params, own.batch),
        lambda own: own.by_row(own.step, own.params),
    ),
    "per_example_norms": (
        fpipe.per_example_norms,
        lambda pipe, own: pipe.step(own.params, own.batch),
        lambda own: norms_of(own.by_row(own.step, own.params)),
    ),
    "per_example_norms of vmap": (
        lambda pipe: fpipe.per_example_norms(fpipe.vmap(pipe)),
        lambda pipe, own: pipe.step(stacked(own.params), own.batch),
        lambda own: norms_of(own.by_row(vmap(own.step, (0, None)), stacked(own.params))),
    ),
    "jvp": (
        fpipe.jvp,
        lambda pipe, own: pipe.value(own.params, own.batch, own.vector),
        lambda own: jvp(lambda p: own.loss(p, own.batch), (own.params,), (own.vector,)),
    ),
    "hvp": (
        fpipe.hvp,
        lambda pipe, own: pipe.step(own.params, own.batch, own.vector),
        lambda own: own.product(own.params, own.batch, own.vector),
    ),
    "ggnvp": (
        fpipe.ggnvp,
        lambda pipe, own: pipe.step(own.params, own.batch, own.vector),
        lambda own: own.gauss_newton(),
    ),
    "vmap of hvp": (
        lambda pipe: fpipe.vmap(fpipe.hvp(pipe), (0, None, None)),
        lambda pipe, own: pipe.step(stacked(own.params), own.batch, own.vector),
        lambda own: vmap(own.product, (0, None, None))(stacked(own.params), own.batch, own.vector),
    ),
    "hvp of vmap": (
        lambda pipe: fpipe.hvp(fpipe.vmap(pipe)),
        lambda pipe, own: pipe.step(stacked(own.params), own.batch, stacked(own.vector)),
        lambda own: vmap(own.product, (0, None, 0))(
            stacked(own.params), own.batch, stacked(own.vector)
        ),
    ),
    "per_example_grads of hvp": (
        lambda pipe: fpipe.per_example_grads(fpipe.hvp(pipe)),
        lambda pipe, own: pipe.step(own.params, own.batch, own.vector),
        lambda own: own.by_row(lambda p, row: own.product(p, row, own.vector), own.params),
    ),
    "vmap of vmap": (
        lambda pipe: fpipe.vmap(fpipe.vmap(pipe)),
        lambda pipe, own: pipe.step(stacked(stacked(own.params), 3), own.batch),
        lambda own: vmap(vmap(own.step, (0, None)), (0, None))(
            stacked(stacked(own.params), 3), own.batch
        ),
    ),
}


def weights_of_members(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**batch, "weight": torch.stack([batch["weight"], batch["weight"].flip(0)])}


@cache
def weighted_pipe(name: str, stages: int, compile: bool = False) -> Any:
    make = schedules.looped_bfs if stages == 4 else schedules.gpipe
    schedule = make(ranks=min(stages, 2), microbatches=MICROBATCHES)
    pipe = fpipe.pipeline(
        Given(stages).stages, weighted, schedule, reduction="weighted", compile=compile
    )
    return CASES[name][0](pipe)


@cache
def expected(name: str, stages: int) -> Any:
    return tuple(CASES[name][2](Given(stages)))


def check_case(name: str, schedule: Schedule, compile: bool = False) -> None:
    own = Given(schedule.num_stages)
    pipe = weighted_pipe(name, schedule.num_stages, compile).with_schedule(schedule)
    assert_same(tuple(CASES[name][1](pipe, own)), expected(name, schedule.num_stages), 1e-9)


@pytest.mark.parametrize("name", CASES)
def test_each_loss_is_over_its_own_weight(name: str) -> None:
    """Transforms take turns with schedules of two stages and of four, to be traced once each."""
    stages = 4 if list(CASES).index(name) % 2 else 2
    for family in FAMILIES:
        schedule = schedules.get(family, ranks=2, microbatches=MICROBATCHES)
        if schedule.num_stages == stages:
            check_case(name, schedule)


@pytest.mark.inductor
def test_compiled_losses_over_their_own_weights() -> None:
    """In one stage, for borders have no weight. test_cut_function.py has norms of an ensemble."""
    check_case("vmap of hvp", schedules.zb_h1(ranks=1, microbatches=MICROBATCHES), compile=True)


def test_weighted_losses_within_torch_func() -> None:
    """Calls of the pipeline in torch's own transforms, by parameters and by leaves of the batch."""
    own = Given(2)
    schedule = schedules.zb_h1(ranks=2, microbatches=MICROBATCHES)
    pipe = fpipe.pipeline(own.stages, weighted, schedule, reduction="weighted", compile=False)
    params = stacked(own.params)
    found = vmap(pipe.step, (0, None))(params, own.batch)
    assert_same(tuple(found), vmap(own.step, (0, None))(params, own.batch))

    def ours(params: Any, x: Tensor) -> Tensor:
        return pipe.value(params, {**own.batch, "x": x})

    def theirs(params: Any, x: Tensor) -> Tensor:
        return own.loss(params, {**own.batch, "x": x})

    by_both = (
        vmap(grad(function, (0, 1)), (0, None))(params, own.batch["x"])
        for function in (ours, theirs)
    )
    assert_same(*by_both)
    ensemble, weights = fpipe.vmap(pipe), torch.tensor([2.0, -1.0]).double()
    pulled = grad(lambda p: ensemble.value(p, own.batch).dot(weights))(params)
    assert_same(
        pulled, grad(lambda p: vmap(own.loss, (0, None))(p, own.batch).dot(weights))(params)
    )


def test_loss_of_weight_zero_spoils_no_other_gradient() -> None:
    """A loss over a weight of 0 is NaN, and once made all gradients NaN though it was not used."""
    torch.manual_seed(0)

    def masked(params: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        own = (batch["x"] @ params).square().sum(1) * batch["mask"]
        return own.sum(), batch["mask"].sum()

    schedule = schedules.gpipe(ranks=1, microbatches=2)
    pipe = fpipe.pipeline(masked, schedule=schedule, reduction="weighted", compile=False)
    params, x = torch.randn(3, 2).double(), torch.randn(4, 3).double()
    batch = {"x": x, "mask": torch.tensor([1.0, 0.0, 1.0, 1.0]).double()}
    rows, used = fpipe.per_example_grads(pipe), [0, 2, 3]
    assert rows.value(params, batch).isnan().tolist() == [False, True, False, False]
    found = grad(lambda p: rows.value(p, batch)[used].sum())(params)
    assert_same(found, grad(lambda p: (x[used] @ p).square().sum())(params))
    # One that counts is told of.
    assert grad(lambda p: rows.value(p, batch).sum())(params).isnan().all()
    several = fpipe.vmap(pipe, (None, {"x": None, "mask": 0}))
    masks = {"x": x, "mask": torch.stack([batch["mask"], torch.zeros(4).double()])}
    alone = grad(lambda p: pipe.value(p, batch))(params)
    assert_same(grad(lambda p: several.value(p, masks)[0])(params), alone)
    assert grad(lambda p: several.value(p, masks).sum())(params).isnan().all()


def test_number_of_weights_is_that_of_losses() -> None:
    schedule = schedules.gpipe(ranks=1, microbatches=2)
    pipe = fpipe.pipeline(
        [lambda w, x: x * w], lambda y, _: (y.sum(), y), schedule, reduction="weighted",
        compile=False,
    )  # fmt: skip
    for transform in (fpipe.vmap, fpipe.per_example_grads):
        with pytest.raises(StageError, match="whose weight is one real number"):
            transform(pipe).step([torch.ones(3)], torch.ones(4))
    alone = fpipe.pipeline(
        [lambda w, x: x * w], lambda y, _: y.sum(), schedule, reduction="weighted", compile=False
    )
    for direction in (fpipe.hvp, fpipe.ggnvp):
        with pytest.raises(StageError, match=r"must return \(sum, weight\)"):
            direction(alone).step([torch.ones(())], torch.ones(4), [torch.ones(())])


# ── one function with a weight and aux ──────────────────────────────────────────────────────────


@cache
def with_aux() -> fpipe.Pipeline:
    return fpipe.pipeline(
        returns_model.weighted_model,
        schedule=schedules.gpipe(ranks=4, microbatches=4),
        reduction="weighted", has_aux=True, out_dims=returns_model.OUT_DIMS, compile=False,
    )  # fmt: skip


def test_aux_of_an_ensemble_has_the_members_in_front() -> None:
    one = with_aux()
    ensemble = fpipe.vmap(one)
    params, batch = stacked(returns_model.make_params(), 3), returns_model.make_batch()
    loss, grads, aux = ensemble.step(params, batch)
    theirs = vmap(grad_and_value(returns_model.by_microbatch), (0, None))(params, batch)
    assert_same((grads, loss), theirs)
    each = [one.step(pytree.tree_map(lambda p, m=m: p[m], params), batch).aux for m in range(3)]
    assert_same(aux, pytree.tree_map(lambda *own: torch.stack(own), *each))
    assert_same(ensemble.forward(params, batch).aux, aux)
    for family in ("zb_h1", "interleaved_1f1b", "zbv"):
        ranks = 2 if family != "zb_h1" else 4
        moved = ensemble.with_schedule(schedules.get(family, ranks=ranks, microbatches=4))
        assert_same(tuple(moved.step(params, batch)), (loss, grads, aux))
    again = vmap(one.step, (0, None))(params, batch)
    assert_same(tuple(again), (loss, grads, aux))


def test_aux_of_rows_has_the_rows_in_front() -> None:
    params, batch = returns_model.make_params(), returns_model.make_batch()
    # A row without tokens has no loss of its own.
    batch["targets"][4, 0] = batch["targets"][7, 0] = 1
    loss, grads, aux = fpipe.per_example_grads(with_aux()).step(params, batch)
    norms = fpipe.per_example_norms(with_aux()).step(params, batch)
    assert_same(tuple(norms), (*norms_of((loss, grads)), aux))
    rows = [pytree.tree_map(lambda leaf, r=r: leaf[r : r + 1], batch) for r in range(9)]
    for r, row in enumerate(rows):
        theirs, (value, own) = grad_and_value(returns_model.plain_loss, has_aux=True)(params, row)
        assert_same((loss[r], pytree.tree_map(lambda g, r=r: g[r], grads)), (value, theirs))
        kept = {name for name, dim in returns_model.OUT_DIMS.items() if dim is not None}
        assert_same({name: aux[name][r] for name in kept}, {name: own[name] for name in kept})


def test_derivatives_of_one_function_have_aux() -> None:
    params, batch = returns_model.make_params(), returns_model.make_batch()
    vector = pytree.tree_map(torch.sin, params)
    pipe = fpipe.hvp(with_aux())
    loss, grads, product, aux = pipe.step(params, batch, vector)
    assert_same(aux, with_aux().step(params, batch).aux)
    value, slope = pipe.value(params, batch, vector)
    forward = pipe.forward(params, batch, vector, out_dims=returns_model.OUT_DIMS)
    assert_same((tuple(forward.loss), forward.aux), ((value, slope), aux))

    def step(own: Any) -> Any:
        found, value = grad_and_value(returns_model.by_microbatch)(own, batch)
        return value, found

    pushed: Any = jvp(step, (params,), (vector,))
    theirs, (_, bent) = pushed
    assert_same((loss, grads, product), (*theirs, bent), 1e-9)
    dots = [
        (g * v).sum() for g, v in zip(*(pytree.flatten(t)[0] for t in (grads, vector)), strict=True)
    ]
    assert_same((value, slope), (loss, torch.stack(dots).sum()))


def test_aux_of_stages_comes_with_derivatives() -> None:
    """The loss function after the stages declares it, and Gauss–Newton products have it too."""
    own = Given(2)

    def loss(y: Tensor, batch: Any) -> Any:
        return weighted(y, batch), {"y": y, "most": y.amax()}

    pipe = fpipe.pipeline(
        own.stages, loss, schedules.zb_h1(ranks=2, microbatches=MICROBATCHES),
        reduction="weighted", has_aux=True, compile=False,
    )  # fmt: skip
    aux = pipe.step(own.params, own.batch).aux
    for name, transform in (("hvp", fpipe.hvp), ("ggnvp", fpipe.ggnvp)):
        found = transform(pipe).step(own.params, own.batch, own.vector)
        assert_same(tuple(found), (*expected(name, 2), aux), 1e-9)
    several = fpipe.vmap(fpipe.hvp(pipe), (0, None, None)).step(
        stacked(own.params), own.batch, own.vector
    )
    each = fpipe.vmap(pipe).step(stacked(own.params), own.batch)
    assert_same(tuple(several), (*expected("vmap of hvp", 2), each.aux), 1e-9)
    assert several.aux["most"].shape == (2, MICROBATCHES)


# ── a state ─────────────────────────────────────────────────────────────────────────────────────


@cache
def stateful(batch_norm: str = "microbatch") -> fpipe.Pipeline:
    return fpipe.pipeline(
        state_model.stateful_model,
        schedule=schedules.one_f_one_b(ranks=4, microbatches=4),
        has_state=True, has_aux=True, batch_norm=batch_norm, compile=False,
    )  # fmt: skip


def one_by_one(pipe: Any, params: Any, states: Any, members: int) -> Any:
    """Each member's step by itself, stacked."""
    batch = state_model.make_batch()
    results = []
    for m in range(members):
        own, state = (pytree.tree_map(lambda leaf, m=m: leaf[m], part) for part in (params, states))
        results.append(tuple(pipe.step(own, state, batch)))
    return pytree.tree_map(lambda *own: torch.stack(own), *results)


@pytest.mark.parametrize("batch_norm", ["microbatch", "deferred"])
def test_each_member_has_a_state(batch_norm: str) -> None:
    one = stateful(batch_norm)
    params, states = stacked(state_model.make_params()), stacked(state_model.make_state())
    batch = state_model.make_batch()
    wanted = one_by_one(one, params, states, 2)
    ensemble = fpipe.vmap(one, (0, 0, None))
    for family, ranks in (("one_f_one_b", 4), ("zb_h1", 4), ("interleaved_1f1b", 2), ("zbv", 2)):
        moved = ensemble.with_schedule(schedules.get(family, ranks=ranks, microbatches=4))
        assert_same(tuple(moved.step(params, states, batch)), wanted)
    assert_same(tuple(vmap(one.step, (0, 0, None))(params, states, batch)), wanted)


def test_members_may_begin_with_one_state_and_may_lie_anywhere() -> None:
    params, state = stacked(state_model.make_params()), state_model.make_state()
    batch = state_model.make_batch()
    both = pytree.tree_map(lambda leaf: torch.stack([leaf, leaf]), state)
    wanted = one_by_one(stateful(), params, both, 2)
    shared = fpipe.vmap(stateful(), (0, None, None)).step(params, state, batch)
    assert_same(tuple(shared), wanted)
    last = pytree.tree_map(lambda leaf: leaf.movedim(0, -1), both)
    found = fpipe.vmap(stateful(), (0, -1, None)).step(params, last, batch)
    moved = pytree.tree_map(lambda leaf: leaf.movedim(-1, 0), found.state)
    assert_same((found.loss, found.grads, moved), wanted[:3])


def test_each_member_of_an_ensemble_of_ensembles_has_a_state() -> None:
    params = stacked(stacked(state_model.make_params()), 3)
    states = stacked(stacked(state_model.make_state()), 3)
    found = fpipe.vmap(fpipe.vmap(stateful(), (0, 0, None)), (0, 0, None)).step(
        params, states, state_model.make_batch()
    )
    for m in range(3):
        own, state = (pytree.tree_map(lambda leaf, m=m: leaf[m], p) for p in (params, states))
        wanted = one_by_one(stateful(), own, state, 2)
        assert_same(pytree.tree_map(lambda leaf, m=m: leaf[m], tuple(found)), wanted)


@pytest.mark.parametrize(
    "trainable", [{"w": True, "frozen": False}, lambda path: path == ("w",), False]
)
def test_members_with_a_state_and_frozen_parameters(trainable: Any) -> None:
    def counted(params: Any, state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        h = fpipe.cut(torch.tanh(batch @ params["w"]))
        return (h * params["frozen"]).square().mean(), state + 1

    one = fpipe.pipeline(
        counted,
        schedule=schedules.zb_h1(ranks=2, microbatches=2),
        has_state=True,
        trainable=trainable,
        compile=False,
    )
    params = stacked(stacked({"w": torch.randn(2, 3), "frozen": torch.randn(3)}), 3)
    batch, count = torch.randn(4, 2), torch.zeros(3, 2)
    found = fpipe.vmap(fpipe.vmap(one)).step(params, count, batch)
    theirs = vmap(vmap(lambda p: counted(p, count[0, 0], batch)[0]))
    assert found.grads["frozen"] is None
    if trainable is False:
        assert found.grads["w"] is None
    else:
        assert_same(found.grads["w"], grad(lambda p: theirs(p).sum())(params)["w"], 1e-5)
    assert torch.equal(found.state, count + 2)


def test_ensemble_of_modules_with_batch_norm() -> None:
    """The parameters and buffers of `torch.func.stack_module_state` are accepted as they are."""
    torch.manual_seed(0)
    modules = [
        nn.Sequential(
            nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)
        ).double()
        for _ in range(3)
    ]
    one = fpipe.from_module(
        modules[0], cuts=["1"], schedule=schedules.zb_h1(ranks=2, microbatches=2),
        loss=lambda y, batch: y.square().mean(), has_state=True, compile=False,
    )  # fmt: skip
    params, buffers = stack_module_state(modules)
    batch = {"input": torch.randn(6, 2).double()}
    states = {
        "1": BatchStats(buffers["1.running_mean"], buffers["1.running_var"]),
        "1.num_batches_tracked": buffers["1.num_batches_tracked"],
    }
    found = fpipe.vmap(one, (0, 0, None)).step(params, states, batch)
    for m, module in enumerate(modules):
        own = {name: p.detach() for name, p in module.named_parameters()}
        wanted = one.step(own, fpipe.nn.state_of(module), batch)
        assert_same(pytree.tree_map(lambda leaf, m=m: leaf[m], tuple(found)), tuple(wanted))


def test_the_members_of_a_state_are_counted() -> None:
    pipe = fpipe.vmap(stateful(), (0, 0, None))
    params, states = stacked(state_model.make_params()), stacked(state_model.make_state(), 3)
    with pytest.raises(BatchError, match=r"state\['count'\] has 3 members .* has 2"):
        pipe.step(params, states, state_model.make_batch())
    with pytest.raises(StageError, match=r"each of \(params, state, batch\), such as \(0, 0, None"):
        fpipe.vmap(stateful(), (0, None))
    with pytest.raises(BatchError, match=r"state\['count'\] has 3 members .* has 2"):
        fpipe.vmap(stateful()).step(params, states, state_model.make_batch())


# ── parameters that are not trained ─────────────────────────────────────────────────────────────


def frozen(part: str, path: tuple[Any, ...]) -> bool:
    return part not in map(str, path)


@pytest.mark.parametrize("choice", ["function", "prefix", "whole stages"])
@pytest.mark.parametrize("transform", [fpipe.hvp, fpipe.ggnvp], ids=["hvp", "ggnvp"])
def test_parameter_that_is_not_trained_has_no_direction(transform: Any, choice: str) -> None:
    """A parameter that is not trained is a constant of the derivative."""
    # Gradients go through a whole stage that is not trained to the one before it.
    num_stages = 4 if choice == "whole stages" else 2
    model, schedule = mlp(num_stages, 6), schedules.zb_h1(ranks=num_stages, microbatches=3)
    flags = [
        pytree.unflatten(pytree.structure(part), [i != index % 2 for i in range(leaves)])
        for index, part in enumerate(model.params)
        for leaves in [len(pytree.flatten(part)[0])]
    ]
    if choice == "whole stages":
        flags = [False, True, False, True]
    given: Any = flags
    chosen = fpipe.spec.objective.Trainable(flags).flags(
        [pytree.structure(part) for part in model.params], shared=False
    )
    if choice == "function":
        known = {
            (stage, *path)
            for stage, part in enumerate(model.params)
            for flag, path in zip(chosen[stage], pytree.structure(part).paths(), strict=True)
            if flag
        }
        given = lambda path: path in known  # noqa: E731
    flat, spec = pytree.flatten(model.params)
    keep = [flag for row in chosen for flag in row]
    vector = [torch.cos(leaf) for leaf in flat]
    one = fpipe.pipeline(model.stages, model.loss, schedule, trainable=given, compile=False)
    pipe = transform(one)
    found = pipe.step(model.params, model.batch, pytree.unflatten(spec, vector))
    zeroed = [v if flag else torch.zeros_like(v) for v, flag in zip(vector, keep, strict=True)]
    whole = transform(fpipe.pipeline(model.stages, model.loss, schedule, compile=False)).step(
        model.params, model.batch, pytree.unflatten(spec, zeroed)
    )

    def trained(grads: Any) -> Any:
        own = [g if flag else None for g, flag in zip(pytree.flatten(grads)[0], keep, strict=True)]
        return pytree.unflatten(spec, own)

    assert_same(tuple(found), (whole.loss, trained(whole.grads), trained(whole.hvp)))
    # A vector as the gradients are, with None for what is not trained.
    again = pipe.step(model.params, model.batch, trained(pytree.unflatten(spec, vector)))
    assert_identical(tuple(again), tuple(found))
    if choice == "whole stages":
        parts = pytree.unflatten(spec, vector)
        short = [own if flag else None for own, flag in zip(parts, flags, strict=True)]
        again = pipe.step(model.params, model.batch, short)
        assert_identical(tuple(again), tuple(found))
        with pytest.raises(BatchError, match=r"or None for what is not trained"):
            pipe.step(model.params, model.batch, [None] * 4)
    if transform is fpipe.hvp:
        slope = fpipe.jvp(one).value(model.params, model.batch, pytree.unflatten(spec, vector))
        grads = pytree.flatten(whole.grads)[0]
        assert_same(slope.jvp, sum((g * v).sum() for g, v in zip(grads, zeroed, strict=True)))


def test_directions_of_an_ensemble_with_frozen_parameters() -> None:
    """One function, of whose two matrices one is trained."""

    def loss(params: Any, batch: Tensor) -> Tensor:
        return (fpipe.cut(torch.tanh(batch @ params["base"])) @ params["head"]).square().mean()

    load_rules()
    torch.manual_seed(0)
    params = {
        "base": torch.randn(2, 3, 3).double(),
        "head": torch.randn(2, 3, 2).double(),
    }
    batch, along = torch.randn(6, 3).double(), torch.randn(2, 3, 2).double()
    one = fpipe.pipeline(
        loss, schedule=schedules.zb_h1(ranks=2, microbatches=3),
        trainable={"base": False, "head": True}, compile=False,
    )  # fmt: skip

    def product(base: Tensor, head: Tensor, along: Tensor) -> Any:
        own = lambda h: loss({"base": base, "head": h}, batch)  # noqa: E731
        return jvp(grad(own), (head,), (along,))[1]

    wanted = vmap(product)(params["base"], params["head"], along)
    for pipe in (fpipe.hvp(fpipe.vmap(one)), fpipe.vmap(fpipe.hvp(one), (0, None, 0))):
        found = pipe.step(params, batch, {"base": torch.ones_like(params["base"]), "head": along})
        assert_same(found.hvp, {"base": None, "head": wanted}, 1e-9)


# ── over two processes ──────────────────────────────────────────────────────────────────────────


def declared_over_ranks(group: dist.ProcessGroup | None) -> list[Any]:
    results: list[Any] = []
    schedule = schedules.zb_h1(ranks=2, microbatches=MICROBATCHES)
    own = Given(2)
    one = fpipe.pipeline(
        own.stages, weighted, schedule, reduction="weighted", group=group, compile=False,
        trainable=[False, True],
    )  # fmt: skip
    own.params, own.vector = one.local(own.params), one.local(own.vector)
    for name in ("vmap", "per_example_norms of vmap", "per_example_grads", "hvp of vmap", "ggnvp"):
        make, call, _ = CASES[name]
        results.append(tuple(call(make(one), own)))
    state = fpipe.vmap(
        fpipe.pipeline(
            state_model.stateful_model,
            schedule=schedules.interleaved_1f1b(ranks=2, microbatches=4),
            has_state=True, has_aux=True, group=group, compile=False,
        ),
        (0, None, None),
    )  # fmt: skip
    params, given = stacked(state_model.make_params()), state_model.make_state()
    found = state.step(params, given, state_model.make_batch())
    return [*results, (found.loss, found.state)]


def test_declared_results_over_two_processes(pair: Crew) -> None:
    pair.start(declared_over_ranks)
    whole = declared_over_ranks(None)
    for rank, parts in enumerate(values(pair.collect())):
        for part, all_of_it in zip(parts, whole, strict=True):
            for mine, theirs in zip(part, all_of_it, strict=True):
                if isinstance(theirs, list):
                    theirs = [own if s == rank else None for s, own in enumerate(theirs)]
                assert_identical(mine, theirs)


# ── what is not defined ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("transform", "options", "rule"),
    [
        (fpipe.per_example_grads, {"has_state": True}, "per_example_grads of .*has_state=True"),
        (fpipe.per_example_norms, {"has_state": True}, "per_example_norms of .*has_state=True"),
        (fpipe.hvp, {"has_state": True}, r"fpipe\.hvp of a pipeline with has_state=True"),
        (
            lambda pipe: fpipe.grad(fpipe.vmap(pipe), "batch"),
            {"reduction": "weighted"},
            "members who share a leaf weigh its gradients differently",
        ),
    ],
)
def test_declaration_without_a_meaning_is_refused_when_made(
    transform: Any, options: Any, rule: str
) -> None:
    pipe = fpipe.pipeline(
        lambda *arguments: None, schedule=schedules.gpipe(ranks=1, microbatches=1), **options
    )
    with pytest.raises(StageError, match=rule):
        transform(pipe)
