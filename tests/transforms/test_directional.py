"""Derivatives in a direction through a pipeline: those of torch.func on the whole function.

Every schedule is in test_every_schedule.py, with a small model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import fpipe
from fpipe import BatchError, StageError, pytree, schedules
from tests.models import Model, apply, assert_same, conv, mlp, pipe_of, short_gpt, unpipelined

TOLERANCE = 1e-9
# They take long to trace: two stages of each, and the V shape for the convolutions.
MODELS: dict[str, Callable[[int], Model]] = {"gpt": short_gpt, "conv": partial(conv, 2)}
SCHEDULES = {
    "gpt": schedules.zb_h1(ranks=2, microbatches=2),
    "conv": schedules.zbv(ranks=1, microbatches=2),
}


def vector_like(params: Any, seed: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return pytree.tree_map(
        lambda p: torch.randn(p.shape, dtype=p.dtype, generator=generator), params
    )


class Flat:
    """The unpipelined loss as a function of flat parameters."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.leaves, self.spec = pytree.flatten(model.params)

    def output(self, leaves: Sequence[Tensor]) -> Any:
        params = pytree.unflatten(self.spec, leaves)
        return apply(self.model.stages, params, self.model.batch)

    def loss(self, leaves: Sequence[Tensor]) -> Tensor:
        return self.model.loss(self.output(leaves), self.model.batch)

    def hvp(self, vector: Any) -> Any:
        # Forward over reverse: torch has the other order wrong for normalisations.
        with sdpa_kernel(SDPBackend.MATH):
            found: Any = jvp(grad(self.loss), (self.leaves,), (pytree.flatten(vector)[0],))
        return pytree.unflatten(self.spec, found[1])

    def ggnvp(self, vector: Any, of: Callable[[Any], Tensor]) -> Any:
        """`of` picks the floating-point part of the output."""

        def output(leaves: Sequence[Tensor]) -> Tensor:
            return of(self.output(leaves))

        def loss(y: Tensor) -> Tensor:
            whole = self.output(self.leaves)
            whole = {**whole, "logits": y} if isinstance(whole, dict) else y
            return self.model.loss(whole, self.model.batch)

        with sdpa_kernel(SDPBackend.MATH):
            pushed: Any = jvp(output, (self.leaves,), (pytree.flatten(vector)[0],))
            bent: Any = jvp(grad(loss), pushed[:1], pushed[1:])
            (product,) = vjp(output, self.leaves)[1](bent[1])
        return pytree.unflatten(self.spec, product)


@pytest.mark.parametrize("name", MODELS)
def test_hvp_equals_torch_func(name: str) -> None:
    """Microbatches of two sizes."""
    schedule = SCHEDULES[name]
    model = MODELS[name](5)
    vector = vector_like(model.params)
    loss, grads, product = fpipe.hvp(pipe_of(model, schedule)).step(
        model.params, model.batch, vector
    )
    assert_same(fpipe.Step(loss, grads), unpipelined(*model), TOLERANCE)
    assert_same(product, Flat(model).hvp(vector), TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_jvp_equals_torch_func(name: str) -> None:
    schedule = SCHEDULES[name]
    model = MODELS[name](4)
    vector = vector_like(model.params)
    pipe = fpipe.jvp(pipe_of(model, schedule))
    flat = Flat(model)
    with sdpa_kernel(SDPBackend.MATH):
        expected = jvp(flat.loss, (flat.leaves,), (pytree.flatten(vector)[0],))
    assert_same(tuple(pipe.value(model.params, model.batch, vector)), expected, TOLERANCE)


def test_forward_returns_the_output_and_its_derivative() -> None:
    model = conv(2, 5)
    pipe = fpipe.jvp(pipe_of(model, schedules.zbv(ranks=1, microbatches=2)))
    vector = vector_like(model.params)
    y, derivative = pipe.forward(
        model.params, model.batch, vector, out_dims={"logits": 0, "label": 0}
    )
    flat = Flat(model)
    expected = jvp(lambda p: flat.output(p)["logits"], (flat.leaves,), (pytree.flatten(vector)[0],))
    assert_same((y["logits"], derivative["logits"]), expected, TOLERANCE)
    assert torch.equal(y["label"], model.batch["label"])
    assert derivative["label"] is None


def test_forward_merges_along_the_out_dims_of_the_pipeline() -> None:
    """The out_dims of the pipeline were once not read."""
    schedule, w = schedules.gpipe(ranks=2, microbatches=2), torch.eye(3)
    columns = fpipe.pipeline(
        [lambda w, x: x @ w, lambda w, x: (x @ w).T],
        lambda y, _: y.mean(),
        schedule,
        out_dims=1,
        compile=False,
    )
    x = torch.arange(12.0).view(4, 3)
    y, derivative = fpipe.jvp(columns).forward([w, w], x, [w, w])
    assert torch.equal(y, columns.forward([w, w], x)) and torch.equal(derivative, 2 * y)
    rows = fpipe.jvp(columns).forward([w, w], x, [w, w], out_dims=0)[0]
    assert rows.shape == (6, 2)

    several = fpipe.pipeline(
        [lambda w, x: x @ w, lambda w, x: {"all": x @ w, "last": (x @ w).sum(0)}],
        lambda y, _: y["all"].mean(),
        schedule,
        out_dims={"all": 0, "last": None},
        compile=False,
    )
    found = fpipe.per_example_grads(fpipe.jvp(several)).forward([w, w], x, [w, w])
    assert [part["all"].shape for part in found] == [(4, 1, 3)] * 2

    def loss_fn(w: Tensor, x: Tensor) -> Any:
        h = fpipe.cut(x @ w)
        return h.mean(), {"all": h, "last": h.sum(0)}

    pipe = fpipe.pipeline(
        loss_fn,
        schedule=schedule,
        has_aux=True,
        out_dims={"all": 0, "last": None},
        compile=False,
    )
    assert_same(fpipe.jvp(pipe).forward(w, x, w).aux, pipe.forward(w, x).aux, TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_ggnvp_equals_torch_func(name: str) -> None:
    schedule = SCHEDULES[name]
    model = MODELS[name](4)
    vector = vector_like(model.params)
    pipe = fpipe.ggnvp(pipe_of(model, schedule))
    loss, grads, product = pipe.step(model.params, model.batch, vector)
    assert_same(fpipe.Step(loss, grads), unpipelined(*model), TOLERANCE)
    expected = Flat(model).ggnvp(vector, lambda y: y["logits"] if isinstance(y, dict) else y)
    assert_same(product, expected, TOLERANCE)
    slope = sum((g * v).sum() for g, v in zip(*map(leaves_of, (grads, vector)), strict=True))
    assert_same(pipe.value(model.params, model.batch, vector).jvp, slope, TOLERANCE)


def leaves_of(value: Any) -> list[Tensor]:
    return pytree.flatten(value)[0]


def test_ensemble_of_products_equals_each_product() -> None:
    """vmap and hvp in either order; a vector for each member, or one for all."""
    model = mlp(2, 6)
    pipe = pipe_of(model, schedules.zbv(ranks=1, microbatches=2))
    params = pytree.tree_map(lambda p: torch.stack([p, p * 1.1, p * 0.9]), model.params)
    vector = vector_like(model.params)
    vectors = pytree.tree_map(lambda v: torch.stack([v] * 3, -1), vector)
    ours = fpipe.vmap(fpipe.hvp(pipe), (0, None, -1)).step(params, model.batch, vectors)
    assert ours.loss.shape == (3,)
    shared = fpipe.vmap(fpipe.hvp(pipe), (0, None, None)).step(params, model.batch, vector)
    assert_same(tuple(shared), tuple(ours), TOLERANCE)
    other = fpipe.hvp(fpipe.vmap(pipe)).step(
        params, model.batch, pytree.tree_map(lambda v: v.movedim(-1, 0), vectors)
    )
    assert_same(tuple(other), tuple(ours), TOLERANCE)
    for number in range(3):
        own = pytree.tree_map(lambda p, n=number: p[n], params)
        alone = fpipe.hvp(pipe).step(own, model.batch, vector)
        picked = pytree.tree_map(lambda p, n=number: p[n], tuple(ours))
        assert_same(picked, tuple(alone), TOLERANCE)


def test_vmap_of_hvp_over_a_mapped_batch() -> None:
    """Arguments without a direction are mapped too."""
    model = mlp(2, 6)
    pipe = fpipe.hvp(pipe_of(model, schedules.zbv(ranks=1, microbatches=2)))
    batch = pytree.tree_map(lambda leaf: torch.stack([leaf, leaf.flip(0) * 2]), model.batch)
    vector = vector_like(model.params)
    ours = fpipe.vmap(pipe, (None, 0, None)).step(model.params, batch, vector)
    for number in range(2):
        own = pytree.tree_map(lambda leaf, n=number: leaf[n], batch)
        alone = pipe.step(model.params, own, vector)
        picked = pytree.tree_map(lambda p, n=number: p[n], tuple(ours))
        assert_same(picked, tuple(alone), TOLERANCE)


def test_vmap_of_hvp_over_a_basis_is_the_hessian() -> None:
    model = mlp(1, 4, width=2)
    pipe = pipe_of(model, schedules.gpipe(ranks=1, microbatches=2))
    flat = Flat(model)
    sizes = [leaf.numel() for leaf in flat.leaves]
    basis = torch.eye(sum(sizes), dtype=torch.float64).split(sizes, 1)
    columns = [part.view(-1, *leaf.shape) for part, leaf in zip(basis, flat.leaves, strict=True)]
    rows = fpipe.vmap(fpipe.hvp(pipe), (None, None, 0)).step(
        model.params, model.batch, pytree.unflatten(flat.spec, columns)
    )
    ours = torch.cat([leaf.flatten(1) for leaf in leaves_of(rows.hvp)], 1)
    theirs = vmap(lambda *v: jvp(grad(flat.loss), (flat.leaves,), (list(v),))[1])(*columns)
    theirs = torch.cat([leaf.flatten(1) for leaf in theirs], 1)
    assert_same(ours, theirs, TOLERANCE)
    assert_same(ours, ours.T.contiguous(), TOLERANCE)


def test_vector_may_have_the_structure_of_the_gradients() -> None:
    """Integer leaves have no direction: None stands for them, or anything at all."""

    def gather(p: Any, x: Tensor) -> Tensor:
        return (x @ p["w"])[:, p["order"]].tanh()

    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline([gather, gather], lambda y, _: y.square().mean(), schedule, compile=False)
    params = [{"w": torch.randn(3, 3).double(), "order": torch.tensor([2, 0, 1])} for _ in range(2)]
    x = torch.randn(4, 3).double()
    _, grads, _ = fpipe.hvp(pipe).step(params, x, params)
    assert grads[0]["order"] is None
    sparse = fpipe.hvp(pipe).step(params, x, [{"w": p["w"], "order": None} for p in params])
    assert_same(tuple(sparse), tuple(fpipe.hvp(pipe).step(params, x, params)))


KEYS = torch.tensor([[True, False, True], [False] * 3, [True] * 3])  # that queries may look at


def general(x: Tensor) -> Tensor:
    return x[:, 1:] + torch.diag(torch.arange(0.0, 9.0, 3.0))


def lu_diagonal(x: Tensor) -> Tensor:
    return torch.linalg.lu_factor(x)[0].diagonal(dim1=-2, dim2=-1)


def solved_by_factor(factor: Tensor, right: Tensor) -> Tensor:
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    return torch.linalg.solve_triangular(factor.mH, half, upper=True)


# Kernels whose forward-mode rule torch differentiates wrongly, or not at all.
SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, (4,), x[0], x[1]),
    "layer_norm of halves": lambda x: F.layer_norm(x.to(torch.bfloat16), (4,)).to(x.dtype),
    "batch_norm": lambda x: F.batch_norm(x, None, None, x[0], x[1], training=True),
    "batch_norm with statistics": lambda x: F.batch_norm(x, x[0].detach(), x[1].detach() ** 2),
    "instance_norm": lambda x: F.instance_norm(x.view(3, 2, 2), None, None, x[0, :2], x[1, :2]),
    "instance_norm with statistics": lambda x: F.instance_norm(
        x.view(3, 2, 2), x[0, :2].detach(), x[1, :2].detach() ** 2, use_input_stats=False
    ),
    "glu": lambda x: F.glu(x),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None] ** 2),
    "attention of a query without keys": lambda x: F.scaled_dot_product_attention(
        x[None], x[None], x[None] ** 2, KEYS
    ),
    "attention of such a query by a mask of floats": lambda x: F.scaled_dot_product_attention(
        x[None], x[None], x[None] ** 2, torch.zeros(3, 3).double().masked_fill(~KEYS, -torch.inf)
    ),
    "sinc": lambda x: torch.sinc(torch.stack([x[0], x[1] / 9, x[2] / 99])),
    "lu_solve": lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor(x[:, :3]), x),
    "lerp_": lambda x: (x * 2).lerp_(x.sin(), x.cos()),
    # In place of operations that are refused.
    "lu_solve for a vector": lambda x: torch.linalg.lu_solve(
        *torch.linalg.lu_factor(x[:, :3]), x[:, 3].unsqueeze(-1)
    ),
    "lu_solve for several": lambda x: torch.linalg.lu_solve(
        *torch.linalg.lu_factor(x[None, :, :3]), torch.stack([x, x**2])
    ).sum(0),
    "determinant": lambda x: lu_diagonal(torch.stack([x[:, :3], x[:, 1:]])).prod(-1),
    "logarithm of a determinant": lambda x: lu_diagonal(
        torch.complex(x[:, 1:], x[:, :3])
    ).abs().log().sum(-1),
    "solve_triangular": lambda x: solved_by_factor(torch.linalg.cholesky(x @ x.T), x),
    "inverse of a triangle": lambda x: torch.linalg.inv(x[:, :3].tril() @ x[:, :3].tril().mH),
    "eigenvalues": lambda x: torch.linalg.eigvalsh(x @ x.T),
    "eigenvalues of any matrix": lambda x: torch.linalg.eigvals(general(x)).abs(),
    "products step by step": lambda x: torch.stack(
        list(itertools.accumulate((x * KEYS[0, 1:].repeat(2)).unbind(1), torch.mul)), 1
    ),
    "powers": lambda x: torch.stack([(x[0] * KEYS[0, 1:].repeat(2)) ** k for k in range(3)], -1),
    "logsumexp of each part": lambda x: x.unsqueeze(-2).masked_fill(
        torch.ones(4, 4, dtype=torch.bool).triu(1), -torch.inf
    ).logsumexp(-1),
    "between sorted values": lambda x: torch.lerp(
        x.sort(-1).values[:, 1], x.sort(-1).values[:, 2], 0.3
    ),
}  # fmt: skip


def hvp_of(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The product with the second derivative of the sum of squares, and ones."""
    pipe = fpipe.pipeline(
        [lambda p, _: function(p)], lambda y, _: y.square().sum(),
        schedules.gpipe(ranks=1, microbatches=1), reduction="sum", compile=False,
    )  # fmt: skip
    found: Tensor = fpipe.hvp(pipe).step([x], torch.ones(1), [torch.ones_like(x)]).hvp[0]
    return found


def test_second_derivative_of_sinc_at_zero() -> None:
    """It was once NaN; the second derivative of torch is 0 there, where -π²/3 is right."""
    x = torch.tensor([0.0, 1e-9, 0.5], dtype=torch.float64)
    found = hvp_of(torch.sinc, x)
    # The second derivative of y² is 2 y'² + 2 y y''.
    assert_same(found[:2], torch.full((2,), -2 * torch.pi**2 / 3, dtype=torch.float64), 1e-9)
    assert_same(found[2:], hvp_of(lambda x: (torch.pi * x).sin() / (torch.pi * x), x[2:]), 1e-9)


def test_group_norm_of_channels_last() -> None:
    """The rules of torch take a view of channels and places, which channels_last does not have."""
    x = torch.randn(1, 4, 2, 3, dtype=torch.float64)
    cubed = torch.arange(24.0, dtype=torch.float64).view(1, 4, 2, 3)
    found = hvp_of(lambda x: F.group_norm(x, 2) * cubed, x.to(memory_format=torch.channels_last))
    assert_same(found, hvp_of(lambda x: F.group_norm(x, 2) * cubed, x), 1e-9)


def test_group_norm_of_a_batch_without_a_direction() -> None:
    """A batch has no tangent, which the rule takes for a tangent without memory."""

    def norm(p: Any, x: Tensor) -> Tensor:
        return F.group_norm(x, 2, p["scale"], p["shift"])

    model = {"scale": torch.randn(4).double(), "shift": torch.randn(4).double()}
    vector = pytree.tree_map(torch.cos, model)
    pipe = fpipe.pipeline(
        [norm], lambda y, _: y.square().sin().mean(), schedules.gpipe(ranks=1, microbatches=1),
        compile=False,
    )  # fmt: skip
    x = torch.randn(3, 4, 5, dtype=torch.float64)

    def loss(p: Any) -> Tensor:
        return norm(p, x).square().sin().mean()

    result: Any = jvp(grad(loss), (model,), (vector,))
    value, expected = result
    found = fpipe.hvp(pipe).step([model], x, [vector])
    assert_same(found.grads[0], value)
    assert_same(found.hvp[0], expected)
    pushed = fpipe.jvp(pipe).value([model], x, [vector])
    result = jvp(loss, (model,), (vector,))
    assert_same(pushed.jvp, result[1])


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_formulas_equal_torch_func(name: str) -> None:
    function = SMOOTH[name]
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = torch.arange(1.0, 13.0, dtype=torch.float64)[: function(x).numel()]

    def weigh(y: Tensor, _: Any) -> Tensor:
        return (y.flatten().sin() * weights).sum()

    def loss(x: Tensor) -> Tensor:
        return weigh(function(x), None)

    schedule = schedules.gpipe(ranks=1, microbatches=1)
    pipe = fpipe.pipeline([lambda p, _: function(p)], weigh, schedule, compile=False)
    vector = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = fpipe.hvp(pipe).step([x], torch.zeros(1), [vector])
    coarse = "halves" in name
    assert_same(found.loss, loss(x), 1e-2 if coarse else TOLERANCE)
    with sdpa_kernel(SDPBackend.MATH):
        expected = jvp(grad(loss), (x,), (vector,))
    assert_same((found.grads[0], found.hvp[0]), expected, 5e-2 if coarse else TOLERANCE)


ALIKE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "weight_norm": (
        lambda x: torch._weight_norm(x, x[:, :1], 0),
        lambda x: x * x[:, :1] / x.square().sum(1, keepdim=True).sqrt(),
    ),
    "weight_norm of columns": (
        lambda x: torch._weight_norm(x, x[:1], -1).sin(),
        lambda x: (x * x[:1] / x.square().sum().sqrt()).sin(),
    ),
    "weight_norm in the middle": (
        lambda x: torch._weight_norm(x.view(3, 3, 1), x[:1].view(1, 3, 1), 1),
        lambda x: x * x[:1] / x.square().sum(0).sqrt(),
    ),
}


@pytest.mark.parametrize("name", ALIKE)
def test_formulas_replace_wrong_forward_mode_rules(name: str) -> None:
    function, other = ALIKE[name]
    x, vector = torch.randn(2, 3, 3, dtype=torch.float64, generator=SEED)

    def loss(x: Tensor, _: Any) -> Tensor:
        return function(x).cos().sum()

    schedule = schedules.gpipe(ranks=1, microbatches=1)
    pipe = fpipe.pipeline(loss, schedule=schedule, compile=False)
    _, grads, product = fpipe.hvp(pipe).step(x, torch.zeros(1), vector)

    def theirs(x: Tensor) -> Tensor:
        return other(x).cos().sum()

    expected = jvp(grad(theirs), (x,), (vector,))
    assert_same((grads, product), expected, TOLERANCE)


SEED = torch.Generator().manual_seed(0)


def test_recomputed_values_are_not_sent_again() -> None:
    """Full remat hands what it recomputes from I to W, and some of it had gone to the next rank."""
    params = [torch.randn(2, 4).double(), torch.randn(4, 1).double()]
    batch, vector = {"x": torch.randn(4, 2).double()}, vector_like(params)
    schedule = schedules.zb_h1(ranks=2, microbatches=2)
    stages = [lambda p, batch: torch.tanh(batch["x"] @ p), lambda p, x: x @ p]
    found = [
        fpipe.hvp(
            fpipe.pipeline(
                stages, lambda y, _: y.square().mean(), schedule, remat=remat, compile=False
            )
        ).step(params, batch, vector)
        for remat in ("full", "none")
    ]
    assert_same(tuple(found[0]), tuple(found[1]), TOLERANCE)


# ── by the batch ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("argnums", ["batch", ("batch",), ("params", "batch"), ("batch", "params")])
@pytest.mark.parametrize("still", [None, "params", "batch"])
def test_hvp_by_the_argnums_of_grad(argnums: Any, still: str | None) -> None:
    """Leaves that stages read, one that only the loss reads, one not split, and integers.

    Microbatches have two sizes where both arguments move.
    """

    def shifted(p: Tensor, x: Tensor, batch: Any) -> Tensor:
        return torch.tanh(x @ p * batch["shift"] + batch["ids"][:, None])

    def loss(y: Tensor, batch: Any) -> Any:
        return (y - batch["more"][0]).square().mean(), {"y": y}

    def entry(p: Tensor, batch: Any) -> Tensor:
        return torch.tanh(batch["more"][1]["x"] @ p)

    names = (argnums,) if isinstance(argnums, str) else argnums
    if still in names and len(names) == 1:
        return
    pipe = fpipe.pipeline(
        [entry, fpipe.Stage(shifted, reads_batch=True)],
        loss,
        schedules.zb_h1(ranks=2, microbatches=2),
        in_dims={"more": 0, "shift": None, "ids": 0},
        has_aux=True,
        compile=False,
    )
    rows = 4 if still else 5
    params = [torch.randn(3, 3).double(), torch.randn(3, 3).double()]
    batch = {
        "more": (torch.randn(rows, 3).double(), {"x": torch.randn(rows, 3).double()}),
        "shift": torch.randn(3).double(),
        "ids": torch.arange(rows),
    }
    smooth = {name: leaf for name, leaf in batch.items() if name != "ids"}

    def whole(own: Any, rest: Any) -> Tensor:
        full = {**rest, "ids": batch["ids"]}
        found: Tensor = loss(shifted(own[1], entry(own[0], full), full), full)[0]
        return found

    given = {"params": vector_like(params), "batch": {**vector_like(smooth, 2), "ids": None}}
    vectors = tuple(None if name == still else given[name] for name in names)
    derivatives = fpipe.hvp(fpipe.grad(pipe, argnums))
    vector = vectors[0] if isinstance(argnums, str) else vectors
    loss_, grads, products, aux = derivatives.step(params, batch, vector)

    arguments = {"params": params, "batch": smooth}
    zeros = {name: pytree.tree_map(torch.zeros_like, own) for name, own in arguments.items()}
    moving = {name: given[name] for name in names if name != still}
    moving["batch"] = {k: v for k, v in moving.get("batch", zeros["batch"]).items() if k != "ids"}
    along = {**zeros, **moving}
    places = tuple({"params": 0, "batch": 1}[name] for name in names)
    expected: Any = jvp(grad(whole, places), (params, smooth), (along["params"], along["batch"]))
    grads, products = ((own,) if isinstance(argnums, str) else own for own in (grads, products))
    for name, *found in zip(names, grads, products, *expected, strict=True):
        own = [{k: v for k, v in part.items() if k != "ids"} if isinstance(part, dict) else part
               for part in found]  # fmt: skip
        assert_same(own[1], own[3], TOLERANCE)
        if name == still:
            assert own[0] is None
        else:
            assert_same(own[0], own[2], TOLERANCE)
    assert_same(loss_, whole(params, smooth), TOLERANCE)
    assert aux["y"].shape == (rows, 3)
    slope: Any = jvp(whole, (params, smooth), (along["params"], along["batch"]))
    assert_same(tuple(derivatives.value(params, batch, vector)), slope, TOLERANCE)


def test_mixed_derivatives_of_an_ensemble_with_a_shared_batch() -> None:
    model = mlp(2, 4)
    params = pytree.tree_map(lambda p: torch.stack([p, p * 1.1], -1), model.params)
    ensemble = fpipe.vmap(pipe_of(model, schedules.zb_h1(ranks=2, microbatches=2)), (-1, None))
    vectors = vector_like(params), vector_like(model.batch, 2)
    found = fpipe.hvp(fpipe.grad(ensemble, ("params", "batch"))).step(params, model.batch, vectors)

    def total(own: Any, batch: Any) -> Tensor:
        losses: Tensor = vmap(
            lambda p: model.loss(apply(model.stages, p, batch), batch), in_dims=-1
        )(own)
        return losses.sum()

    expected: Any = jvp(grad(total, (0, 1)), (params, model.batch), vectors)
    assert_same((found.grads, found.hvp), expected, TOLERANCE)


# ── refusals ────────────────────────────────────────────────────────────────────────────────────

MODEL = mlp(2, 4)
PIPE = pipe_of(MODEL, schedules.one_f_one_b(ranks=2, microbatches=2))


@pytest.mark.parametrize("transform", [fpipe.hvp, fpipe.per_example_norms])
def test_wrapped_pipeline_takes_another_schedule(transform: Any) -> None:
    model = mlp(2, 4)
    schedule = schedules.zb_h1(ranks=2, microbatches=2)
    wrapped = transform(pipe_of(model, schedules.gpipe(ranks=2, microbatches=2)))
    assert wrapped.with_schedule(schedule).schedule == schedule
    assert wrapped.rank is None


@pytest.mark.parametrize("transform", [fpipe.jvp, fpipe.hvp, fpipe.ggnvp])
def test_refuses_what_is_no_pipeline_or_takes_a_vector(transform: Any) -> None:
    name = transform.__name__
    with pytest.raises(StageError, match=rf"is a str: fpipe\.{name} takes a pipeline"):
        transform("pipe")
    with pytest.raises(StageError, match=rf"fpipe\.{name} of a pipeline that takes a vector"):
        transform(fpipe.hvp(PIPE))


def test_ggnvp_of_an_ensemble_is_refused_with_the_other_order() -> None:
    with pytest.raises(StageError, match=r"as in fpipe\.vmap\(fpipe\.ggnvp\(pipe\)\)"):
        fpipe.ggnvp(fpipe.vmap(PIPE))


@pytest.mark.parametrize(
    ("vector", "text"),
    [
        (MODEL.params[:1], "vector is a list of 1: it must be a list or tuple of 2"),
        ([MODEL.params[0], None], r"vector\[1\] lacks .* of params\[1\]: a vector has the"),
        ([{"w": torch.zeros(2), "c": torch.zeros(3)}] * 2,
         r"vector\[0\] lacks \['b'\] of params\[0\] and has \['c'\], which params\[0\] has n"),
        ([list(MODEL.params[0].values()), MODEL.params[1]], r"vector\[0\] lacks"),
        ([{"w": torch.zeros(2), "b": torch.zeros(3)}] * 2,
         r"vector\[0\]\['b'\] is torch.float32 of shape \(3,\), but it is a direction of torch.fl"),
    ],
)  # fmt: skip
def test_vector_that_does_not_fit_the_parameters_is_refused(vector: Any, text: str) -> None:
    with pytest.raises(BatchError, match=text):
        fpipe.hvp(PIPE).step(MODEL.params, MODEL.batch, vector)


def test_refuses_kernels_whose_second_derivative_would_be_wrong() -> None:
    def stage(p: Tensor, _: Any) -> Tensor:
        return torch.layer_norm(p, (4,))

    pipe = fpipe.pipeline([stage], lambda y, _: y.sum(), schedules.gpipe(ranks=1, microbatches=1),
                          compile=False)  # fmt: skip
    with pytest.raises(StageError, match=r"second derivative of aten\.native_layer_norm.default"):
        fpipe.hvp(pipe).step([torch.randn(2, 4)], torch.zeros(1), [torch.randn(2, 4)])


# The operation, and what its refusal says of it: the name, why, and what to call instead.
LU = "would be wrong; call torch.linalg.lu_solve"
REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "tensorsolve": (lambda p: torch.linalg.tensorsolve(p, p[0]), f"linalg_tensorsolve {LU}"),
    "householder_product": (
        lambda p: torch.linalg.householder_product(p, p[0]),
        ".*householder_product would be wrong; call torch.linalg.qr",
    ),
    "orgqr": (lambda p: torch.orgqr(p, p[0]), "orgqr would be wrong; call torch.linalg.qr"),
    "vander": (
        lambda p: torch.linalg.vander(p[0]),
        "linalg_vander would be no number at zeros; take torch.stack",
    ),
    "triangular_solve": (
        lambda p: torch.triangular_solve(p, p)[0],
        "triangular_solve would be wrong; call torch.linalg.solve_triangular",
    ),
    "solve": (lambda p: torch.linalg.solve(p, p[0]), f"linalg_solve {LU}"),
    "solve_ex": (lambda p: torch.linalg.solve_ex(p, p)[0], f"linalg_solve_ex {LU}"),
    "solve for what moves": (lambda p: torch.linalg.solve(torch.eye(3), p), f"linalg_solve {LU}"),
    "linalg.det": (torch.linalg.det, "linalg_det would be wrong; take it of d = .*lu_factor"),
    "det": (lambda p: p.det() + torch.det(p), "det would be wrong; take it of d = .*lu_factor"),
    "linalg.slogdet": (
        lambda p: torch.linalg.slogdet(p)[1],
        "linalg_slogdet would be wrong; take it of d = .*lu_factor",
    ),
    "slogdet": (lambda p: p.slogdet()[1], "slogdet would be wrong; take it of d = .*lu_factor"),
    "logdet": (lambda p: p.logdet(), "logdet would be wrong; take it of d = .*lu_factor"),
    "cholesky_solve": (
        lambda p: torch.cholesky_solve(p, p),
        "cholesky_solve would be wrong; call torch.linalg.solve_triangular",
    ),
    "cholesky_inverse": (
        lambda p: p.cholesky_inverse(),
        "cholesky_inverse would be wrong; call torch.linalg.inv",
    ),
    "eigh": (
        lambda p: torch.linalg.eigh(p + p.T)[1],
        "linalg_eigh would be no number; of eigenvalues alone call torch.linalg.eigvalsh",
    ),
    "eig": (
        lambda p: torch.linalg.eig(p)[1].abs(),
        "linalg_eig would be no number; of eigenvalues alone call torch.linalg.eigvals,",
    ),
    "cumprod": (lambda p: torch.cumprod(p, 0), "cumprod would be no number at zeros; call torch.s"),
    "cumprod of itself": (lambda p: p.cumprod(-1), "cumprod would be no number at zeros; call"),
    "cumprod_": (lambda p: p.clone().cumprod_(0), "cumprod_ would be no number at zeros; call"),
    "logcumsumexp": (
        lambda p: p.logcumsumexp(0),
        "logcumsumexp would lose its digits; call torch.logsumexp",
    ),
    "quantile": (lambda p: p.quantile(0.3, 1), "quantile fails in torch; sort the values"),
    "nanquantile": (
        lambda p: torch.nanquantile(p, 0.3),
        "nanquantile fails in torch; sort the values",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_operations_whose_derivative_would_be_wrong(name: str) -> None:
    function, text = REFUSED[name]
    p = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))

    def loss(p: Tensor, batch: Tensor) -> Any:
        found: Tensor = function(p if moves else batch).sin().sum()
        return found * p.mean()

    moves = True
    schedule = schedules.gpipe(ranks=1, microbatches=1)
    pipe = fpipe.pipeline(loss, schedule=schedule, compile=False)
    refused = pytest.raises(StageError, match=f"the second derivative of {text}")
    with refused:
        fpipe.hvp(pipe).step(p, p, p)
    with refused:
        fpipe.jvp(pipe).value(p, p, p)
    with refused:
        fpipe.vmap(fpipe.hvp(pipe), (0, None, 0)).step(p[None], p, p[None])
    with refused:
        fpipe.hvp(fpipe.vmap(pipe)).step(p[None], p, p[None])
    stages: Any = [lambda p, _: function(p)]
    with refused:
        fpipe.ggnvp(fpipe.pipeline(stages, lambda y, _: y.sum(), schedule, compile=False)).step(
            [p], torch.zeros(1), [p]
        )
    moves = False
    if "quantile" in name:  # which would break the thread's further derivatives
        with refused:
            fpipe.hvp(fpipe.pipeline(loss, schedule=schedule, compile=False)).step(p, p, p)
        return
    # Constants are not refused, and the numbers are right.
    still = fpipe.pipeline(loss, schedule=schedule, compile=False)
    assert_same(fpipe.hvp(still).step(p, p, p).grads, grad(loss)(p, p))


def test_operations_of_constants_are_not_refused() -> None:
    """Integers of the batch, and values that are computed within no_grad."""
    schedule = schedules.gpipe(ranks=1, microbatches=1)
    counts = fpipe.pipeline(
        lambda x, batch: (x * torch.cumprod(batch, 0)).sum(), schedule=schedule, compile=False
    )
    counted = fpipe.hvp(counts).step(torch.ones(4), torch.arange(1, 5), torch.ones(4))
    assert counted.grads.tolist() == [1, 2, 6, 24]

    def clipped(p: Tensor, _: Tensor) -> Tensor:
        with torch.no_grad():
            bound = p.cumprod(0)[1] + 0.5
        return p.clamp(max=bound).square().sum()

    pipe = fpipe.pipeline(clipped, schedule=schedule, compile=False)
    p = torch.tensor([1.0, 2.0, 3.0])
    assert fpipe.hvp(pipe).step(p, torch.zeros(1), torch.ones(3)).hvp.tolist() == [2.0, 2.0, 0.0]


def test_refuses_operations_within_a_derivative_of_the_stage_s_own() -> None:
    """Transforms in the stage lie between the operation and the direction."""

    def loss(p: Tensor, x: Tensor) -> Tensor:
        inner: Tensor = grad(lambda m: (torch.logdet(m) * p.sum()).sin())(x)
        return inner.sum() + grad(lambda m: (torch.logdet(m + p)).sin())(x).sum()

    schedule = schedules.gpipe(ranks=1, microbatches=1)
    pipe = fpipe.pipeline(loss, schedule=schedule, compile=False)
    p = torch.eye(3)
    with pytest.raises(StageError, match="the second derivative of logdet would be wrong"):
        fpipe.hvp(pipe).step(p, 2 * p, p)


@pytest.mark.parametrize("transform", [fpipe.jvp, fpipe.hvp])
def test_refuses_products_that_are_scattered(transform: Any) -> None:
    """The tangent that torch gives them is zero."""
    index = torch.tensor([[0, 0, 1]])

    def loss(p: Tensor, x: Tensor) -> Tensor:
        return x.scatter_reduce(1, index, p, "prod").square().sum()

    schedule = schedules.gpipe(ranks=1, microbatches=1)
    pipe = fpipe.pipeline(loss, schedule=schedule, compile=False)
    p, x = torch.rand(1, 3) + 1, torch.ones(1, 3)
    expected = torch.func.grad(loss)(p, x)
    torch.testing.assert_close(pipe.step(p, x).grads, expected)
    with pytest.raises(StageError, match=r"scatter_reduce.two with reduce='prod' would be wrong"):
        transform(pipe).value(p, x, p)


@pytest.mark.parametrize("transform", [fpipe.jvp, fpipe.hvp])
def test_refuses_operations_without_a_forward_mode_rule(transform: Any) -> None:
    schedule = schedules.gpipe(ranks=1, microbatches=1)
    pipe = fpipe.pipeline(lambda p, x: torch.cdist(p, x).sum(), schedule=schedule, compile=False)
    p = torch.randn(3, 3)
    with pytest.raises(StageError, match=r"forward AD with _cdist_forward .*: fpipe\.jvp") as told:
        transform(pipe).value(p, torch.zeros(3, 3), p)
    assert "github" not in str(told.value)


@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
def test_refuses_running_statistics(norm: Any) -> None:
    def stage(p: Tensor, x: Tensor) -> Tensor:
        mean, variance = torch.zeros(3), torch.ones(3)
        return norm(x * p, mean, variance, None, None, True)

    pipe = fpipe.pipeline([stage], lambda y, _: y.sum(), schedules.gpipe(ranks=1, microbatches=1),
                          compile=False)  # fmt: skip
    with pytest.raises(StageError, match=r"updates its running statistics in place"):
        fpipe.hvp(pipe).step([torch.ones(())], torch.randn(2, 3, 4), [torch.ones(())])


def test_hvp_by_argnums_needs_a_vector_for_each() -> None:
    both = fpipe.hvp(fpipe.grad(PIPE, ("params", "batch")))
    with pytest.raises(BatchError, match=r"must be a tuple of 2, one .* of \(params, batch\)"):
        both.step(MODEL.params, MODEL.batch, MODEL.params)
    with pytest.raises(BatchError, match=r"vector=\(None, None\) moves nothing"):
        both.step(MODEL.params, MODEL.batch, (None, None))
    with pytest.raises(BatchError, match="vector=None moves nothing"):
        fpipe.hvp(PIPE).step(MODEL.params, MODEL.batch, None)
    with pytest.raises(BatchError, match=r"vector\[1\] is .*, but batch is .*a direction of"):
        both.step(MODEL.params, MODEL.batch, (None, MODEL.batch["x"]))
    with pytest.raises(StageError, match=r"fpipe\.ggnvp of a pipeline whose argnums are"):
        fpipe.ggnvp(fpipe.grad(PIPE, "batch"))
