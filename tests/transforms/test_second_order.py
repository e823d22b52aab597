"""A pipeline differentiated twice: what autograd and torch.func give without a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe import FpipeError, Stage, pytree, schedules
from fpipe.functional.dual import load_rules
from tests.models import apply, assert_same, mlp
from tests.transforms.grid import bare

# Stages in the middle are in test_every_schedule.py.
MODEL = mlp(2, 6)
PARAMS, BATCH = MODEL.params, MODEL.batch
SCHEDULE = schedules.zb_h1(ranks=2, microbatches=3)
PIPE = fpipe.pipeline(MODEL.stages, MODEL.loss, SCHEDULE, compile=False)
ALONG = pytree.tree_map(torch.cos, PARAMS)
ALONG_BATCH = pytree.tree_map(torch.sin, BATCH)
TASKS = pytree.tree_map(lambda leaf: torch.stack([leaf, 2 * leaf]), BATCH)
MEMBERS = pytree.tree_map(lambda leaf: torch.stack([leaf, 1.1 * leaf]), PARAMS)
ALONG_MEMBERS = pytree.tree_map(torch.cos, MEMBERS)

Value = Callable[..., Any]


@pytest.fixture(autouse=True, scope="module")
def rules() -> None:
    load_rules()  # torch warns of its own code when it first loads them


def whole(params: Any, batch: Any) -> Tensor:
    return MODEL.loss(apply(MODEL.stages, params, batch), batch)


def whole_step(params: Any, batch: Any) -> Any:
    grads, loss = grad_and_value(whole)(params, batch)
    return loss, grads


def squares(value: Any) -> Tensor:
    found: Tensor = sum(leaf.square().sum() for leaf in pytree.flatten(value)[0])
    return found


def biased(bias: Tensor) -> Any:
    return [{**PARAMS[0], "b": bias}, *PARAMS[1:]]


def adapted(value: Value, params: Any, batch: Any) -> Any:
    """Parameters after a gradient step."""
    return pytree.tree_map(lambda p, g: p - 0.1 * g, params, grad(value)(params, batch))


BIAS = PARAMS[0]["b"]

CASES: dict[str, Callable[[Value, Value], Any]] = {
    # Forward.
    "jvp": lambda value, step: jvp(lambda p: value(p, BATCH), (PARAMS,), (ALONG,)),
    "jvp by the batch": lambda value, step: jvp(
        lambda b: value(PARAMS, b), (BATCH,), (ALONG_BATCH,)
    ),
    "jvp by both": lambda value, step: jvp(value, (PARAMS, BATCH), (ALONG, ALONG_BATCH)),
    "jvp of step": lambda value, step: jvp(
        lambda *a: tuple(step(*a)), (PARAMS, BATCH), (ALONG, ALONG_BATCH)
    ),
    "jacfwd": lambda value, step: jacfwd(lambda b: value(biased(b), BATCH))(BIAS),
    # Reverse over reverse.
    "grad of step": lambda value, step: grad(lambda p: loss_and_slope(*step(p, BATCH)))(PARAMS),
    "grad of step by the batch": lambda value, step: grad(
        lambda b: loss_and_slope(*step(PARAMS, b))
    )(BATCH),
    "grad of grad": lambda value, step: grad(lambda p: squares(grad(value)(p, BATCH)))(PARAMS),
    "gradient penalty": lambda value, step: grad(lambda p: squares(grad(value, 1)(p, BATCH)))(
        PARAMS
    ),
    "mixed": lambda value, step: grad(lambda *a: squares(grad(value, (0, 1))(*a)), (0, 1))(
        PARAMS, BATCH
    ),
    "through a step of its own": lambda value, step: grad(
        lambda p: value(adapted(value, p, BATCH), ALONG_BATCH)
    )(PARAMS),
    "learned data": lambda value, step: grad(
        lambda b: value(adapted(value, PARAMS, b), ALONG_BATCH)
    )(BATCH),
    "jacrev of jacrev": lambda value, step: jacrev(jacrev(lambda b: value(biased(b), BATCH)))(BIAS),
    "vjp": lambda value, step: vjp(lambda p: grad(value)(p, BATCH), PARAMS)[1](ALONG),
    # Forward over reverse, and reverse over forward.
    "jvp of grad": lambda value, step: jvp(
        grad(value, (0, 1)), (PARAMS, BATCH), (ALONG, ALONG_BATCH)
    ),
    "hessian": lambda value, step: hessian(lambda b: value(biased(b), BATCH))(BIAS),
    "hessian by the batch": lambda value, step: hessian(lambda x: value(PARAMS, {**BATCH, "x": x}))(
        BATCH["x"]
    ),
    "grad of jvp": lambda value, step: grad(lambda p, v: slope(value, p, BATCH, v), (0, 1))(
        PARAMS, ALONG
    ),
    "grad of jvp by the batch": lambda value, step: grad(lambda b: slope(value, PARAMS, b, ALONG))(
        BATCH
    ),
    "jacrev of jacfwd": lambda value, step: jacrev(jacfwd(lambda b: value(biased(b), BATCH)))(BIAS),
    # The inner derivative is by one argument, the outer one by another, of the loss too.
    "grad by the batch of grad_and_value": lambda value, step: grad(
        lambda b: both(value, 0, PARAMS, b)
    )(BATCH),
    "grad by the parameters of grad_and_value": lambda value, step: grad(
        lambda p: both(value, 1, p, BATCH)
    )(PARAMS),
    "grad by both of vmap of grad_and_value": lambda value, step: grad(
        lambda p, b: squares(vmap(partial(both, value, (0, 1)), (0, None))(p, b)), (0, 1)
    )(MEMBERS, BATCH),
    "vmap of grad of grad_and_value": lambda value, step: vmap(
        lambda p: grad(lambda b: both(value, 0, p, b))(BATCH)
    )(MEMBERS),
    # With vmap.
    "grad by the batch of vmap": lambda value, step: grad(partial(across, value, (0, None)), 1)(
        MEMBERS, BATCH
    ),
    "jvp of grad by the batch of vmap": lambda value, step: jvp(
        grad(partial(across, value, (0, 0)), 1), (MEMBERS, TASKS), (ALONG_MEMBERS, TASKS)
    ),
    "grad by both of jvp of vmap": lambda value, step: grad(
        lambda p, b: slope(vmap(value, (0, None)), p, b, ALONG_MEMBERS).square().sum(), (0, 1)
    )(MEMBERS, BATCH),
    "vmap of grad of grad": lambda value, step: vmap(
        lambda b: grad(lambda p: value(adapted(value, p, b), BATCH))(PARAMS)
    )(TASKS),
    "grad of vmap, shared": lambda value, step: grad(
        lambda p: vmap(lambda b: value(adapted(value, p, b), BATCH))(TASKS).sum()
    )(PARAMS),
    "grad of vmap, stacked": lambda value, step: grad(
        lambda p: squares(vmap(grad(value), (0, None))(p, BATCH))
    )(MEMBERS),
    "grad of vmap by the batch": lambda value, step: grad(
        lambda b: squares(vmap(grad(value), (0, None))(MEMBERS, b))
    )(BATCH),
    "jvp of vmap": lambda value, step: jvp(
        lambda p: vmap(value, (None, 0))(p, TASKS), (PARAMS,), (ALONG,)
    ),
}


def loss_and_slope(loss: Tensor, grads: Any) -> Tensor:
    return 3 * loss + squares(grads)


def both(value: Value, argnums: Any, params: Any, batch: Any) -> Tensor:
    grads, loss = grad_and_value(value, argnums)(params, batch)
    return loss_and_slope(loss, grads)


def across(value: Value, in_dims: Any, params: Any, batch: Any) -> Tensor:
    return squares(vmap(value, in_dims)(params, batch))


def slope(value: Value, params: Any, batch: Any, vector: Any) -> Tensor:
    pushed: Any = jvp(lambda own: value(own, batch), (params,), (vector,))
    found: Tensor = pushed[0] + 2 * pushed[1]
    return found


@pytest.mark.parametrize("case", CASES)
def test_second_derivative_equals_the_unpipelined_function(case: str) -> None:
    found = CASES[case](PIPE.value, PIPE.step)
    assert_same(found, CASES[case](whole, whole_step))


def test_backward_through_a_backward() -> None:
    """Autograd without torch.func: a gradient penalty, and a step of a learned learning rate."""

    def penalised(value: Value) -> Any:
        params = pytree.tree_map(lambda leaf: leaf.clone().requires_grad_(), PARAMS)
        rate = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
        x = BATCH["x"].clone().requires_grad_()
        leaves, spec = pytree.flatten(params)
        loss = value(params, {**BATCH, "x": x})
        grads = torch.autograd.grad(loss, [*leaves, x], create_graph=True)
        after = pytree.unflatten(spec, [p - rate * g for p, g in zip(leaves, grads, strict=False)])
        (loss + grads[-1].square().sum() + value(after, BATCH)).backward()
        return [leaf.grad for leaf in (*leaves, x, rate)]

    assert_same(penalised(PIPE.value), penalised(whole))


def test_derivatives_equal_finite_differences() -> None:
    """Without torch.func: forward, in reverse, mapped, and once more in reverse."""
    leaves = [leaf.clone().requires_grad_() for leaf in (BIAS, BATCH["x"])]

    def value(bias: Tensor, x: Tensor) -> Tensor:
        loss: Tensor = PIPE.value(biased(bias), {**BATCH, "x": x})
        return loss

    assert torch.autograd.gradcheck(value, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(value, leaves)


def test_second_derivative_of_a_call_in_a_checkpoint() -> None:
    """A checkpoint has hooks, beneath which a call is traced, and hands saved tensors out once."""
    pipe = fpipe.pipeline(MODEL.stages, MODEL.loss, SCHEDULE, compile=False)

    def twice(value: Value) -> Any:
        bias = BIAS.clone().requires_grad_()
        loss = checkpoint(lambda b: value(biased(b), BATCH), bias, use_reentrant=False)
        loss.square().backward()
        return bias.grad

    assert_same(twice(pipe.value), twice(whole))


def test_forward_mode_without_torch_func() -> None:
    # The derived pipeline is traced within this level; torch.func.jvp would be a second one.
    pipe = fpipe.pipeline(MODEL.stages, MODEL.loss, SCHEDULE, compile=False)
    with forward_ad.dual_level():
        params = pytree.tree_map(forward_ad.make_dual, PARAMS, ALONG)
        loss = forward_ad.unpack_dual(pipe.value(params, BATCH))
        grads = pytree.flatten(pipe.step(params, BATCH).grads)[0]
        products = [forward_ad.unpack_dual(leaf).tangent for leaf in grads]
    expected = fpipe.hvp(PIPE).step(PARAMS, BATCH, ALONG)
    assert_same(loss.primal, expected.loss)
    assert_same(loss.tangent, fpipe.jvp(PIPE).value(PARAMS, BATCH, ALONG).jvp)
    assert_same(products, pytree.flatten(expected.hvp)[0])


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (-1, {"x": 1, "y": None})])
def test_second_derivative_of_an_ensemble(in_dims: Any) -> None:
    """Members with separate parameters, and members who share them."""
    dim = in_dims[0]
    params = PARAMS
    if dim is not None:
        params = pytree.tree_map(lambda leaf: torch.stack([leaf, 1.1 * leaf], dim), PARAMS)
    batch = TASKS if in_dims[1] == 0 else BATCH
    if isinstance(in_dims[1], dict):
        batch = {"x": torch.stack([BATCH["x"], 2 * BATCH["x"]], 1), "y": BATCH["y"]}

    def twice(value: Value) -> Any:
        return grad(lambda p: squares(grad(lambda q: value(q, batch).square().sum())(p)))(params)

    assert_same(twice(fpipe.vmap(PIPE, in_dims).value), twice(vmap(whole, in_dims)))
    along = pytree.tree_map(torch.cos, params)
    ours: Any = jvp(lambda p: fpipe.vmap(PIPE, in_dims).value(p, batch), (params,), (along,))
    assert_same(ours, jvp(lambda p: vmap(whole, in_dims)(p, batch), (params,), (along,)))


def test_second_derivative_with_tied_and_frozen_parameters() -> None:
    def loss(params: Any, batch: Any) -> Any:
        hidden = fpipe.cut(torch.tanh(batch["x"] @ params["tied"]))
        y = hidden @ params["tied"].T + params["frozen"]
        weight = batch["weight"].sum()
        return ((y - batch["x"]).square().mean(1) * batch["weight"]).sum(), weight

    def mean(params: Any, batch: Any) -> Tensor:
        total, weight = loss(params, batch)
        return total / weight

    pipe = fpipe.pipeline(
        loss,
        schedule=schedules.zb_h1(ranks=2, microbatches=3),
        reduction="weighted",
        trainable={"tied": True, "frozen": False},
        compile=False,
    )
    params = {"tied": torch.randn(3, 5).double(), "frozen": torch.randn(3).double()}
    batch = {"x": torch.randn(6, 3).double(), "weight": torch.arange(1.0, 7).double()}

    def twice(value: Value) -> Any:
        def penalty(tied: Tensor, x: Tensor) -> Tensor:
            def own(t: Tensor, z: Tensor) -> Any:
                return value({**params, "tied": t}, {**batch, "x": z})

            return squares(grad(own, (0, 1))(tied, x))

        return grad(penalty, (0, 1))(params["tied"], batch["x"])

    assert_same(twice(pipe.value), twice(mean))
    # No gradient flows to what is not trained.
    assert_same(grad(pipe.value)(params, batch)["frozen"], torch.zeros(3).double())


def test_second_derivative_of_a_module() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    pipe = fpipe.from_module(
        module.double(),
        schedule=schedules.one_f_one_b(ranks=2, microbatches=2),
        cuts=["1"],
        loss=lambda output, batch: output.square().mean(),
        compile=False,
    )
    params = {name: p.detach() for name, p in module.named_parameters()}
    x = torch.randn(4, 2).double()

    def plain(own: Any, batch: Any) -> Tensor:
        y: Tensor = torch.func.functional_call(module, own, (batch["input"],))
        return y.square().mean()

    for twice in (hessian, lambda value: grad(lambda *a: squares(grad(value)(*a)))):
        ours, theirs = (twice(value)(params, {"input": x}) for value in (pipe.value, plain))
        assert_same(ours, theirs)


@pytest.mark.parametrize("family", ["one_f_one_b", "zb_h1"])
def test_second_derivative_of_the_cross_entropy_of_sequences(family: str) -> None:
    """A kernel takes contiguous logits alone, and the derivative of logits of sequences is not."""

    def loss_fn(params: Any, batch: Any) -> Tensor:
        hidden = fpipe.cut(torch.tanh(batch["x"] @ params["w"]))
        return F.cross_entropy((hidden @ params["v"]).transpose(1, 2), batch["labels"])

    params = {"w": torch.randn(4, 4).double(), "v": torch.randn(4, 5).double()}
    batch = {"x": torch.randn(4, 3, 4).double(), "labels": torch.randint(5, (4, 3))}
    along = pytree.tree_map(torch.cos, params)
    schedule = schedules.get(family, ranks=2, microbatches=2)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    expected = jvp(lambda p: grad(loss_fn)(p, batch), (params,), (along,))[1]
    assert_same(fpipe.hvp(pipe).step(params, batch, along).hvp, expected)
    ours, theirs = (
        grad(lambda p: squares(grad(value)(p, batch)))(params)  # noqa: B023
        for value in (pipe.value, loss_fn)
    )
    assert_same(ours, theirs)


def test_aux_comes_with_a_second_derivative() -> None:
    def loss(y: Tensor, batch: Any) -> Any:
        return MODEL.loss(y, batch), {"output": y, "rows": torch.tensor(len(y))}

    pipe = fpipe.pipeline(MODEL.stages, loss, SCHEDULE, has_aux=True, compile=False)
    expected = pipe.step(PARAMS, BATCH)
    pushed: Any = jvp(lambda p: tuple(pipe.step(p, BATCH)), (PARAMS,), (ALONG,))
    assert_same(pushed[0], tuple(expected))
    assert_same(pushed[1][1], fpipe.hvp(PIPE).step(PARAMS, BATCH, ALONG).hvp)
    ours = grad(lambda p: loss_and_slope(*pipe.step(p, BATCH)[:2]))(PARAMS)
    assert_same(ours, grad(lambda p: loss_and_slope(*whole_step(p, BATCH)))(PARAMS))


@pytest.mark.inductor
def test_compiled_second_derivative() -> None:
    """Tasks that share parameters; test_every_schedule.py has two stages, without tasks."""
    model = bare(1, 4)
    # One microbatch and no weight gradients apart: fewer kernels.
    schedule = schedules.one_f_one_b(ranks=1, microbatches=1)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule)
    batches = pytree.tree_map(lambda leaf: torch.stack([leaf, 2 * leaf]), model.batch)

    def of_tasks(value: Value) -> Any:
        def one(params: Any, batch: Any) -> Tensor:
            loss: Tensor = value(adapted(value, params, batch), model.batch)
            return loss

        return grad(lambda p: vmap(one, (None, 0))(p, batches).sum())(model.params)

    assert_same(
        of_tasks(pipe.value), of_tasks(lambda p, b: model.loss(apply(model.stages, p, b), b))
    )


def noisy(params: Tensor, x: Tensor, key: Tensor) -> Tensor:
    return fpipe.random.dropout(key, torch.tanh(x @ params))


def test_draws_of_a_key_are_those_of_the_first_derivative() -> None:
    stages = [Stage(noisy, reads_key=True)] * 2
    schedule = schedules.one_f_one_b(ranks=2, microbatches=1)
    pipe = fpipe.pipeline(stages, lambda y, _: y.square().mean(), schedule, compile=False)
    params, x, key = [torch.eye(3).double()] * 2, torch.randn(4, 3).double(), fpipe.random.key(0)

    def plain(own: Any, batch: Tensor) -> Tensor:
        for stage, p in enumerate(own):
            microbatch_key = fpipe.random.fold_in(key, 0)
            batch = noisy(p, batch, fpipe.random.fold_in(microbatch_key, stage))
        return batch.square().mean()

    def twice(value: Value) -> Any:
        return grad(lambda own: squares(grad(lambda p: value(p, x))(own)))(params)

    assert_same(twice(lambda p, b: pipe.value(p, b, key=key)), twice(plain))
    # A key that is made within belongs to a level, but has no derivative.
    made_within = twice(lambda p, b: pipe.value(p, b, key=fpipe.random.key(0)))
    assert_same(made_within, twice(plain))


# ── refusals ────────────────────────────────────────────────────────────────────────────────────


def test_a_third_derivative_is_refused() -> None:
    def slopes(params: Any) -> Any:
        return squares(grad(lambda p: squares(grad(PIPE.value)(p, BATCH)))(params))

    third = "was differentiated three times, or forward twice"
    with pytest.raises(FpipeError, match=third):
        grad(slopes)(PARAMS)
    with pytest.raises(FpipeError, match=third):
        jacfwd(jacfwd(lambda b: PIPE.value(biased(b), BATCH)))(BIAS)
    for function in (fpipe.hvp(PIPE).step, lambda *a: fpipe.jvp(PIPE).value(*a)):
        with pytest.raises(FpipeError, match=third):
            jvp(lambda p, f=function: tuple(f(p, BATCH, ALONG)), (PARAMS,), (ALONG,))


def test_second_derivative_of_draws_without_a_key_is_refused() -> None:
    stage = lambda p, x: F.dropout(x @ p)  # noqa: E731
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline([stage, stage], lambda y, _: y.square().mean(), schedule, compile=False)
    params, x = [torch.eye(3)] * 2, torch.ones(4, 3)
    assert grad(pipe.value)(params, x)[0].shape == (3, 3)
    message = r"its stages draw from torch's generator.* draw from a key"
    with pytest.raises(FpipeError, match=message):
        grad(lambda p: squares(grad(pipe.value)(p, x)))(params)
    with pytest.raises(FpipeError, match=message):
        jvp(lambda p: pipe.value(p, x), (params,), (params,))


def test_pipelines_without_a_second_derivative_are_refused() -> None:
    rows = fpipe.per_example_grads(PIPE)
    with pytest.raises(FpipeError, match="gradients of single examples were differentiated again"):
        grad(lambda p: squares(grad(lambda q: rows.value(q, BATCH).sum())(p)))(PARAMS)
    with pytest.raises(FpipeError, match=r"has no direction there.*pipe\.value"):
        grad(lambda b: fpipe.jvp(PIPE).value(PARAMS, b, ALONG).loss)(BATCH)
    with pytest.raises(FpipeError, match=r"cannot run inside torch\.func\.jvp"):
        jvp(lambda p: PIPE.forward(p, BATCH), (PARAMS,), (ALONG,))
    with pytest.raises(FpipeError, match=r"cannot run inside torch\.func\.grad"):
        grad(lambda p: PIPE.forward(p, BATCH).sum())(PARAMS)
    one = schedules.gpipe(ranks=2, microbatches=1)
    stateful = fpipe.pipeline(
        lambda p, state, x: (fpipe.cut(x * p).mean(), state),
        schedule=one,
        has_state=True,
        compile=False,
    )
    with pytest.raises(FpipeError, match=r"cannot run inside torch\.func\.jvp"):
        jvp(lambda p: stateful.value(p, (), torch.ones(2)), (torch.ones(()),), (torch.ones(()),))


# ── when whoever differentiates has gone on ─────────────────────────────────────────────────────


def second(value: Value, params: Tensor, between: Callable[[], object] = lambda: None) -> Tensor:
    """The product of the second derivative and the gradient, under no autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = value(params)
    (slope,) = torch.autograd.grad(loss, params, create_graph=True)
    between()
    return torch.autograd.grad(slope.square().sum(), params)[0]


def test_a_second_derivative_is_taken_under_the_autocast_of_the_call() -> None:
    """It was once traced anew outside of autocast, with products in another precision."""
    seen: list[torch.dtype] = []

    def stage(w: Tensor, x: Tensor) -> Tensor:
        y = torch.tanh(x @ w)
        seen.append(y.dtype)
        return y

    pipe = fpipe.pipeline(
        [stage],
        lambda y, _: y.float().square().mean(),
        schedules.gpipe(ranks=1, microbatches=2),
        compile=False,
    )
    torch.manual_seed(0)
    w, x = torch.randn(8, 8), torch.randn(16, 8)
    ours = second(lambda p: pipe.value([p], x), w.clone().requires_grad_())
    assert set(seen) == {torch.bfloat16}
    theirs = second(lambda p: stage(p, x).float().square().mean(), w.clone().requires_grad_())
    exact = w.double().requires_grad_()
    y = torch.tanh(x.double() @ exact).square().mean()
    (slope,) = torch.autograd.grad(y, exact, create_graph=True)
    (expected,) = torch.autograd.grad(slope.square().sum(), exact)
    errors = [((found - expected).norm() / expected.norm()).item() for found in (ours, theirs)]
    assert 0.5 < errors[0] / errors[1] < 2


def test_second_derivative_refuses_a_module_in_another_mode() -> None:
    """It was once the second derivative of another function, that of the other mode."""

    class Module(torch.nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            y = super().forward(input)
            return torch.tanh(y) if self.training else y**3

    module = Module(4, 4)
    pipe = fpipe.from_module(
        module,
        schedule=schedules.gpipe(ranks=1, microbatches=2),
        cuts=[],
        loss=lambda y, _: y.float().square().mean(),
        compile=False,
    )
    bias, batch = module.bias.detach(), {"input": torch.randn(6, 4)}

    def value(weight: Tensor) -> Tensor:
        loss: Tensor = pipe.value({"weight": weight, "bias": bias}, batch)
        return loss

    weight = module.weight.detach().clone().requires_grad_()
    with pytest.raises(FpipeError, match=r"put out other numbers .* mode of a module"):
        second(value, weight, module.eval)
    module.train()
    assert second(value, weight).isfinite().all()


@pytest.mark.parametrize("seed", range(3))
def test_second_derivative_of_a_loss_that_cancels(seed: int) -> None:
    """Rounding was once taken for another loss, and products of natural gradients were refused."""
    torch.manual_seed(seed)

    def stage(w: Tensor, batch: Any) -> Tensor:
        return F.layer_norm(F.gelu(batch["x"] @ w), (64,))

    def head(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).log_softmax(-1)

    def divergence(y: Tensor, batch: Any) -> Tensor:
        """The divergence of the model from itself: 0, but for rounding."""
        return (batch["old"].exp() * (batch["old"] - y)).sum(-1).mean()

    schedule = schedules.one_f_one_b(ranks=2, microbatches=4)
    pipe = fpipe.pipeline([stage, head], divergence, schedule, compile=False)
    params = [(0.3 * torch.randn(*shape)).requires_grad_() for shape in ((16, 64), (64, 10))]
    batch = {"x": torch.randn(32, 16)}

    def model(batch: Any) -> Tensor:
        return head(params[1], stage(params[0], batch))

    batch["old"] = model(batch).detach()

    def products(loss: Tensor) -> Any:
        slopes = torch.autograd.grad(loss, params, create_graph=True)
        return torch.autograd.grad(slopes, params, [p.detach().cos() for p in params])

    assert_same(
        products(pipe.value(params, batch)), products(divergence(model(batch), batch)), 1e-3
    )


def test_hessian_of_batched_gradients() -> None:
    schedule = schedules.gpipe(ranks=1, microbatches=2)
    pipe = fpipe.pipeline(
        [lambda w, x: torch.tanh(x @ w)], lambda y, _: y.square().mean(), schedule, compile=False
    )
    w = torch.linspace(-1, 1, 6).double().view(3, 2)
    x = torch.linspace(0, 1, 12).double().view(4, 3)
    found = torch.autograd.functional.hessian(lambda p: pipe.value([p], x), w, vectorize=True)
    assert_same(found, hessian(lambda p: torch.tanh(x @ p).square().mean())(w))
