"""A pipeline within torch.func.vmap and grad, nested: what torch.func gives without a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, grad_and_value, jacrev, vmap

import fpipe
from fpipe import FpipeError, StageError, pytree, schedules
from tests.models import apply, assert_identical, assert_same, mlp
from tests.transforms.helpers import member

# Stages in the middle are in test_every_schedule.py.
MODEL = mlp(2, 6)
BATCH = MODEL.batch
SCHEDULE = schedules.zb_h1(ranks=2, microbatches=3)
PIPE = fpipe.pipeline(MODEL.stages, MODEL.loss, SCHEDULE, compile=False)


def whole(params: Any, batch: Any) -> Tensor:
    return MODEL.loss(apply(MODEL.stages, params, batch), batch)


def plain_step(params: Any, batch: Any) -> tuple[Tensor, Any]:
    grads, loss = grad_and_value(whole)(params, batch)
    return loss, grads


def members(dim: int = 0, number: int = 3, of: Any = MODEL.params) -> Any:
    factors = torch.linspace(0.8, 1.2, number, dtype=torch.float64)
    return pytree.tree_map(lambda p: torch.stack([p * f for f in factors], dim), of)


STACKED = members()


@pytest.mark.parametrize(
    ("in_dims", "params", "batch"),
    [
        ((0, None), STACKED, BATCH),
        ((-1, {"x": 1, "y": None}), members(-1), {"x": members(1, of=BATCH["x"]), "y": BATCH["y"]}),
        ((None, 0), MODEL.params, members(of=BATCH)),
    ],
    ids=["parameters", "both", "batch"],
)
def test_mapped_step_equals_fpipe_vmap(in_dims: Any, params: Any, batch: Any) -> None:
    ours = vmap(PIPE.step, in_dims)(params, batch)
    assert isinstance(ours, fpipe.Step)
    assert_same(tuple(ours), vmap(plain_step, in_dims)(params, batch))


def test_mapped_step_is_traced_once() -> None:
    made: list[Any] = []

    def count(module: Any, examples: Any) -> Any:
        made.append(module)
        return lambda values: module(*values)

    pipe = fpipe.pipeline(MODEL.stages, MODEL.loss, SCHEDULE, compile=count)
    with fpipe.use(pipe):
        found = vmap(fpipe.step, (0, None))(STACKED, BATCH)
        traced = len(made)
        again = vmap(lambda own: fpipe.step(own, BATCH))(STACKED)
    moved = vmap(pipe.with_schedule(SCHEDULE).step, (0, None))(STACKED, BATCH)
    assert traced
    assert len(made) == traced
    assert_identical(tuple(found), tuple(again))
    assert_identical(tuple(found), tuple(moved))
    assert_identical(tuple(found), tuple(fpipe.vmap(PIPE).step(STACKED, BATCH)))


def test_nested_vmaps() -> None:
    params = members(1, 2, STACKED)
    ours = vmap(vmap(PIPE.step, (0, None)), (1, None))(params, BATCH)
    assert_same(tuple(ours), vmap(vmap(plain_step, (0, None)), (1, None))(params, BATCH))
    # The inner level maps another argument than the outer one.
    batches = members(of=BATCH)
    grid = vmap(lambda p: vmap(lambda b: PIPE.value(p, b))(batches))(STACKED)
    assert_same(grid, vmap(lambda p: vmap(lambda b: whole(p, b))(batches))(STACKED))
    mapped = vmap(lambda b: fpipe.vmap(PIPE).step(STACKED, b).loss)(batches)
    assert_same(mapped, grid.T)


def test_mapped_value_forward_and_derived_pipelines() -> None:
    def output(params: Any) -> Any:
        return apply(MODEL.stages, params, BATCH)

    assert_same(vmap(lambda p: PIPE.forward(p, BATCH))(STACKED), vmap(output)(STACKED))
    vector = pytree.tree_map(torch.cos, MODEL.params)
    products = vmap(fpipe.hvp(PIPE).step, (0, None, None))(STACKED, BATCH, vector)
    own = fpipe.vmap(fpipe.hvp(PIPE), (0, None, None)).step(STACKED, BATCH, vector)
    assert_identical(tuple(products), tuple(own))
    slopes = vmap(lambda v: fpipe.jvp(PIPE).value(MODEL.params, BATCH, v).jvp)(STACKED)
    assert slopes.shape == (3,)
    rows = vmap(fpipe.per_example_grads(PIPE).step, (0, None))(STACKED, BATCH)
    assert_same(rows.loss[1], fpipe.per_example_grads(PIPE).value(member(STACKED, 1), BATCH))


def test_every_member_has_a_gradient_of_its_own_by_a_shared_batch() -> None:
    step = fpipe.grad(PIPE, ("params", "batch")).step
    _, ours = vmap(step, (0, None))(STACKED, BATCH)
    theirs = vmap(grad(whole, (0, 1)), (0, None))(STACKED, BATCH)
    assert_same(ours, theirs)


def test_level_that_maps_no_argument_is_passed_through() -> None:
    scale = torch.arange(3.0, dtype=torch.float64)
    loss, grads = plain_step(MODEL.params, BATCH)
    found = vmap(lambda s: s * PIPE.step(MODEL.params, BATCH).loss)(scale)
    assert_same(found, scale * loss)

    def scaled(params: Any) -> Tensor:
        return vmap(lambda s: s * PIPE.value(params, BATCH))(scale).sum()

    assert_same(grad(scaled)(MODEL.params), pytree.tree_map(lambda g: 3 * g, grads))


def test_grad_and_vmap_of_torch_func_in_any_order() -> None:
    def weighted(value: Any) -> Any:
        return lambda p: (vmap(value, (0, None))(p, BATCH) * torch.tensor([1.0, 2.0, 3.0])).sum()

    assert_same(grad(weighted(PIPE.value))(STACKED), grad(weighted(whole))(STACKED))
    ours = vmap(grad(PIPE.value), (0, None))(STACKED, BATCH)
    assert_same(ours, vmap(grad(whole), (0, None))(STACKED, BATCH))
    params = members(1, 2, STACKED)
    ours = vmap(grad(weighted(PIPE.value)), 1)(params)
    assert_same(ours, vmap(grad(weighted(whole)), 1)(params))
    by_batch = vmap(grad(PIPE.value, (0, 1)), (0, None))(STACKED, BATCH)
    assert_same(by_batch, vmap(grad(whole, (0, 1)), (0, None))(STACKED, BATCH))


def test_autograd_outside_of_a_vmap() -> None:
    params = pytree.tree_map(lambda p: p.clone().requires_grad_(), STACKED)
    vmap(PIPE.value, (0, None))(params, BATCH).square().sum().backward()

    def outer(own: Any) -> Tensor:
        return vmap(whole, (0, None))(own, BATCH).square().sum()

    assert_same(pytree.tree_map(lambda p: p.grad, params), grad(outer)(STACKED))


def test_losses_of_ensembles_and_rows_have_a_history() -> None:
    def shared(value: Any) -> Any:
        return lambda p: value(p, members(of=BATCH)).square().sum()

    mapped = fpipe.vmap(PIPE, (None, 0))
    theirs = vmap(whole, (None, 0))
    assert_same(grad(shared(mapped.value))(MODEL.params), grad(shared(theirs))(MODEL.params))
    assert_same(jacrev(fpipe.vmap(PIPE, (-1, None)).value)(members(-1), BATCH),
                jacrev(vmap(whole, (-1, None)))(members(-1), BATCH))  # fmt: skip

    def by_row(params: Any) -> Tensor:
        rows = pytree.tree_map(lambda leaf: leaf[:, None], BATCH)
        return vmap(whole, (None, 0))(params, rows).square().sum()

    rows = fpipe.per_example_grads(PIPE)
    assert_same(grad(lambda p: rows.value(p, BATCH).square().sum())(MODEL.params),
                grad(by_row)(MODEL.params))  # fmt: skip
    both = fpipe.vmap(rows)
    assert_same(grad(lambda p: both.value(p, BATCH).square().sum())(STACKED),
                grad(lambda p: vmap(by_row)(p).sum())(STACKED))  # fmt: skip


def test_call_that_does_not_depend_on_a_level_is_made_below_it() -> None:
    def outer(scale: Tensor) -> Tensor:
        return scale**2 * PIPE.step(MODEL.params, BATCH).loss

    assert_same(grad(outer)(torch.tensor(3.0).double()), 6 * whole(MODEL.params, BATCH))

    def mixed(params: Any) -> Tensor:
        return grad(lambda s: s**2 * PIPE.value(params, BATCH))(torch.tensor(3.0).double())

    expected = pytree.tree_map(lambda g: 6 * g, plain_step(MODEL.params, BATCH)[1])
    assert_same(grad(mixed)(MODEL.params), expected)


def test_gradient_by_a_learned_weight_of_the_data() -> None:
    """Derivatives by a leaf of the batch, through a loss that is one term of many."""

    def loss(y: Tensor, batch: Any) -> Tensor:
        return (batch["weight"] * (y - batch["y"]).square().mean(1)).mean()

    pipe = fpipe.pipeline(MODEL.stages, loss, SCHEDULE, compile=False)
    weight = torch.linspace(0.5, 1.5, 6, dtype=torch.float64)

    def outer(value: Any) -> Any:
        return lambda w, p: value(p, {**BATCH, "weight": w}) ** 2 + w.square().sum()

    def without(params: Any, batch: Any) -> Tensor:
        return loss(apply(MODEL.stages, params, batch), batch)

    ours = grad(outer(pipe.value), (0, 1))(weight, MODEL.params)
    assert_same(ours, grad(outer(without), (0, 1))(weight, MODEL.params))


def noisy(params: Any, x: Tensor) -> Tensor:
    return F.dropout(x @ params, 0.5)


def test_randomness_is_that_of_torch_func_vmap() -> None:
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline([noisy, noisy], lambda y, _: y.mean(), schedule, compile=False)
    # Numbers that no two masks add up to alike: with ones, members would agree now and then.
    params, x = [torch.ones(2, 8, 8)] * 2, torch.linspace(1, 2, 32).sqrt().view(4, 8)
    same = vmap(pipe.step, (0, None), randomness="same")(params, x)
    assert same.loss[0] == same.loss[1]
    different = vmap(pipe.step, (0, None), randomness="different")(params, x)
    assert different.loss[0] != different.loss[1]
    with pytest.raises(StageError, match=r"stage 0 .*randomness"):
        vmap(pipe.step, (0, None))(params, x)


# ── refusals ────────────────────────────────────────────────────────────────────────────────────


def test_other_transforms_are_refused() -> None:
    with pytest.raises(FpipeError, match="a step is pure already"):
        torch.func.functionalize(lambda p: PIPE.step(p, BATCH).loss)(MODEL.params)


def test_forward_mode_without_tangents_is_passed_through() -> None:
    fpipe.jvp(PIPE)  # torch warns of its own code when it first loads its rules
    two, one = torch.tensor(2.0, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    found = torch.func.jvp(lambda z: PIPE.value(MODEL.params, BATCH) * z, (two,), (one,))
    assert_same(found[1], whole(MODEL.params, BATCH))
    with forward_ad.dual_level():
        assert_same(PIPE.step(MODEL.params, BATCH).loss, whole(MODEL.params, BATCH))


def test_torch_compile_leaves_a_pipeline_out_of_its_graph() -> None:
    def trained(params: Any) -> Any:
        loss, grads = PIPE.step(params, BATCH)
        return 2 * loss, pytree.tree_map(lambda p, g: p - 0.1 * g, params, grads)

    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (trained, (MODEL.params,)),
        (lambda p: vmap(PIPE.value, (0, None))(p, BATCH) + 1, (STACKED,)),
    ]
    if torch.__version__ >= "2.12":  # before, grad of whatever is left out of the graph fails
        calls.append((lambda p: grad(PIPE.value)(p, BATCH), (MODEL.params,)))
    for function, arguments in calls:
        compiled = torch.compile(function, backend="eager")
        assert_same(compiled(*arguments), function(*arguments))


def test_calls_that_cannot_be_mapped_or_differentiated_are_refused() -> None:
    norms = fpipe.per_example_norms(PIPE)
    with pytest.raises(StageError, match=r"as in fpipe\.per_example_norms\(fpipe\.vmap\(pipe\)\)"):
        vmap(norms.step, (0, None))(STACKED, BATCH)
    with pytest.raises(FpipeError, match=r"a pipeline cannot run inside torch\.func\.grad"):
        grad(lambda p: norms.value(p, BATCH).sum())(MODEL.params)
    rows = fpipe.per_example_grads(PIPE)
    with pytest.raises(FpipeError, match="a leaf of the batch requires a gradient, but the losses"):
        grad(lambda x: rows.value(MODEL.params, {**BATCH, "x": x}).sum())(BATCH["x"])


def test_a_stage_that_closes_over_a_mapped_tensor_is_refused() -> None:
    def sharp(weight: Tensor, temperature: Tensor) -> Tensor:
        def stage(p: Tensor, x: Tensor) -> Tensor:
            return x @ p / temperature

        schedule = schedules.gpipe(ranks=1, microbatches=1)
        pipe = fpipe.pipeline([stage], lambda y, _: y.square().mean(), schedule, compile=False)
        return pipe.step([weight], torch.ones(2, 3)).loss

    # Its level is popped while the stage is traced, and must not be taken for one that tracing has.
    for in_dims in ((None, 0), (0, 0)):
        with pytest.raises(StageError, match=r"closes over a tensor that a transform of torch\.fu"):
            vmap(sharp, in_dims)(torch.ones(2, 3, 3)[0 if in_dims[0] is None else ...], TWO)


TWO = torch.tensor([1.0, 2.0])
