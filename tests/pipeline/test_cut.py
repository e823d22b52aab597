"""One loss function with cuts is the same engine as stages written by hand."""

from __future__ import annotations

import itertools
import warnings
from functools import cache, partial
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe
from fpipe.functional.dual import load_rules
from fpipe.program.program import Send
from fpipe.schedule import Schedule
from tests.cut_model import (
    IN_DIMS,
    VOCABULARY,
    WIDTH,
    language_model,
    make_batch,
    make_network,
    make_params,
)
from tests.laid_out import laid_out
from tests.models import assert_identical, assert_same, rand


@pytest.fixture
def params() -> dict[str, Any]:
    return make_params()


@pytest.fixture
def batch() -> dict[str, Tensor]:
    return make_batch(9)


def reference(params: dict[str, Any], batch: dict[str, Tensor]) -> tuple[Any, Tensor]:
    trained = {key: value for key, value in params.items() if key != "count"}
    result: tuple[Any, Tensor] = torch.func.grad_and_value(
        lambda own: language_model({**params, **own}, batch)
    )(trained)
    return result


def four_stages(name: str) -> Schedule:
    family = fpipe.schedules.FAMILIES[name]
    for ranks in (4, 2):
        schedule = family(ranks=ranks, microbatches=4)
        if schedule.num_stages == 4:
            return schedule
    raise AssertionError(f"{name} makes no four stages")


@cache
def traced(remat: str) -> fpipe.Pipeline:
    """All schedules share its traces."""
    schedule = fpipe.schedules.gpipe(ranks=4, microbatches=1)
    options: Any = {"in_dims": IN_DIMS, "remat": remat, "compile": False}
    return fpipe.pipeline(language_model, schedule=schedule, **options)


@pytest.mark.parametrize(
    ("name", "remat"), list(zip(fpipe.schedules.FAMILIES, itertools.cycle(["none", "full"])))
)
def test_cut_function_equals_grad_and_value(
    name: str, remat: str, params: dict[str, Any], batch: dict[str, Tensor]
) -> None:
    pipe = traced(remat).with_schedule(four_stages(name))
    loss, grads = pipe.step(params, batch)
    expected_grads, expected = reference(params, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(pipe.value(params, batch), expected, rtol=1e-10, atol=1e-12)
    assert grads.pop("count") is None
    assert optree.tree_structure(grads) == optree.tree_structure(expected_grads)
    for got, wanted in zip(
        optree.tree_leaves(grads), optree.tree_leaves(expected_grads), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_skip_value_travels_straight_and_the_batch_never_does(
    params: dict[str, Any], batch: dict[str, Tensor]
) -> None:
    schedule = fpipe.schedules.gpipe(ranks=4, microbatches=1)
    pipe = fpipe.pipeline(language_model, schedule=schedule, in_dims=IN_DIMS, compile=False)
    sent = [
        instruction.message
        for program in pipe.programs(params, batch)
        for instruction in program.instructions
        if isinstance(instruction, Send)
    ]
    forwards = [(m.source, m.target, len(m.specs)) for m in sent if m.action.op == "SEND_F"]
    # The embedding goes from rank 0 to rank 3 at once; rank 1 gets the block's output alone.
    assert sorted(forwards) == [(0, 1, 1), (0, 3, 1), (1, 2, 1), (2, 3, 1)]
    assert all(spec.dtype == torch.float64 for m in sent for spec in m.specs)
    # The gradient of the shared table is added up where the first stage that reads it lies.
    table = (VOCABULARY, WIDTH)
    totals = [(m.source, m.target) for m in sent for spec in m.specs if spec.shape == table]
    assert totals == [(3, 0)]


def test_cut_is_the_identity_under_transforms() -> None:
    x = torch.randn(3)
    assert fpipe.cut(x) is x
    torch.testing.assert_close(torch.func.vmap(fpipe.cut)(x), x)
    torch.testing.assert_close(torch.func.grad(lambda v: fpipe.cut(v).square().sum())(x), 2 * x)
    tree = {"a": x, "b": None}
    assert fpipe.cut(tree) is tree

    def function(v: Tensor) -> Tensor:
        return fpipe.cut(v.sin()).square()

    load_rules()  # the first jvp of a process makes torch warn of its own code
    pushed: Any = torch.func.jvp(function, (x,), (x,))
    torch.testing.assert_close(pushed, (x.sin().square(), (2 * x).sin() * x))
    # It broke the graph: dynamo cannot read the variable in which a tracer says that it listens.
    compiled: Any = torch.compile(function, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), x.sin().square())


def mapped(w: Tensor, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: (fpipe.cut(row * w) * w).square().mean())(x).mean()


def pushed(w: Tensor, x: Tensor) -> Tensor:
    both: Any = torch.func.jvp(lambda v: fpipe.cut(x * v).square().mean(), (w,), (w,))
    return sum(both)


def differentiated(w: Tensor, x: Tensor) -> Tensor:
    return torch.func.grad(lambda v: fpipe.cut(x * v).sin().mean())(w).square().sum()


@pytest.mark.parametrize("loss_fn", [mapped, pushed, differentiated])
def test_cut_within_transforms_ends_a_stage(loss_fn: Any) -> None:
    load_rules()
    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=1)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    torch.manual_seed(0)
    w, x = torch.randn(3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    expected, value = torch.func.grad_and_value(loss_fn)(w, x)
    torch.testing.assert_close(tuple(pipe.step(w, x)), (value, expected))


def test_in_place_update_before_a_cut_belongs_to_the_stage_before() -> None:
    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        h = x * w
        h[:, 0] += 1.0
        h = fpipe.cut(h)
        return (h * w).square().mean()

    schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    w, x = torch.tensor(2.0, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    loss, grads = pipe.step(w, x)
    expected_grads, expected = torch.func.grad_and_value(loss_fn)(w, x)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads, expected_grads)


@torch.no_grad()
def averaged(params: Any) -> Tensor:
    return params["a"] * 0.5 + params["b"] * 0.5


def target(params: Any, batch: Any) -> Tensor:
    x = fpipe.cut(torch.tanh(batch["x"] @ params["a"]))
    with torch.no_grad():
        aim = torch.tanh(x @ params["b"])
    return (x @ averaged(params) - aim).square().mean()


def rounded(params: Any, batch: Any) -> Tensor:
    x = fpipe.cut(batch["x"] @ params["a"])
    return (x + (x.round() - x).data).square().mean() + (x * x.data).mean()


def parts(params: Any, batch: Any) -> Tensor:
    x = fpipe.cut(batch["x"] @ params["a"])
    seen = x.view(-1)
    x.mul_(2)
    with torch.no_grad():
        size = seen.sum() * 0  # the first look at what is new in `seen`, which has a gradient still
        column = x[:, :1]
    return (x * column).mean() + seen.square().mean() + size


def learned(params: Any, batch: Any) -> Tensor:
    x = fpipe.cut(batch["x"] @ params["a"])
    with torch.no_grad():
        gradient = torch.func.grad(lambda w: torch.tanh(x @ w).square().mean())(params["b"])
    return (x @ (params["b"] - gradient)).square().mean()


@pytest.mark.parametrize("loss_fn", [target, rounded, parts, learned])
def test_what_has_no_gradient_has_none_in_a_pipeline(loss_fn: Any) -> None:
    # Only the forward is recorded, which says nothing of the grad mode: gradients came through.
    params, batch = make_network()
    pipe = fpipe.pipeline(
        loss_fn, schedule=fpipe.schedules.zb_h1(ranks=2, microbatches=1), compile=False
    )
    step = pipe.step(params, batch)
    grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)
    torch.testing.assert_close(step.loss, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(step.grads, grads, rtol=1e-12, atol=1e-12)


def test_value_that_is_transposed_across_a_cut() -> None:
    # What crosses a boundary is contiguous, and a view of its transpose was refused behind it.
    def loss_fn(params: Any, batch: Any) -> Tensor:
        x = torch.tanh(batch["x"] @ params["a"])
        x = fpipe.cut(torch.stack([x, x @ params["b"]]).transpose(0, 1))
        return (x.transpose(0, 1).view(-1, 3) @ params["b"]).square().mean()

    params, batch = make_network()
    pipe = fpipe.pipeline(
        loss_fn, schedule=fpipe.schedules.gpipe(ranks=2, microbatches=2), compile=False
    )
    step = pipe.step(params, batch)
    grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)
    torch.testing.assert_close(step.loss, loss)
    torch.testing.assert_close(step.grads, grads)


def test_value_of_which_a_stage_returns_no_derivative() -> None:
    # A stage none of whose results has a gradient gave none back, and that before waited for it.
    def loss_fn(params: Any, batch: Any) -> Tensor:
        x = fpipe.cut(batch["x"] @ params["a"])
        positive = fpipe.cut(x > 0)
        return (positive.double() @ params["b"]).square().mean()

    params, batch = make_network()
    pipe = fpipe.pipeline(
        loss_fn, schedule=fpipe.schedules.zb_h1(ranks=3, microbatches=2), compile=False
    )
    step = pipe.step(params, batch)
    grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)
    torch.testing.assert_close((step.loss, step.grads), (loss, grads))


def test_check_of_a_derivative_that_nobody_asks_for() -> None:
    # That of a solve was run, with a cotangent that no stage hands back.
    def loss_fn(params: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            x = batch["x"] @ params["a"]
        x = fpipe.cut(x)
        solved = fpipe.cut(torch.linalg.solve(x.t() @ x + torch.eye(3, dtype=x.dtype), x.t()))
        return (solved.t() @ params["b"]).square().mean()

    params, batch = make_network()
    pipe = fpipe.pipeline(
        loss_fn, schedule=fpipe.schedules.zb_h1(ranks=3, microbatches=1), compile=False
    )
    step = pipe.step(params, batch)
    grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)
    torch.testing.assert_close((step.loss, step.grads), (loss, grads))


def halved(x: Tensor) -> Tensor:
    return torch.func.hessian(lambda v: (v * 2).abs())(x.mean()) + x.sum()


def mapped_directions(x: Tensor) -> Tensor:
    def along(direction: Tensor) -> Tensor:
        pushed: Any = torch.func.jvp(torch.func.grad(torch.abs), (x[0, 0],), (direction,))
        return pushed[1]

    return torch.func.vmap(along)(x[0]).sum() + x.square().sum()


@pytest.mark.parametrize("within", [halved, mapped_directions])
def test_direction_that_is_missing_within_a_function(within: Any) -> None:
    # Mapped, the zeros that stand for it lost their device, or ended the process.
    def loss_fn(params: Any, batch: Any) -> Tensor:
        return within(fpipe.cut(batch["x"] @ params["a"])) + 0 * params["b"].sum()

    load_rules()
    params, batch = make_network()
    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=1)
    whole = fpipe.pipeline(loss_fn, schedule=schedule, compile=False).step(params, batch)
    stages = fpipe.pipeline(
        [lambda p, batch: batch["x"] @ p, lambda p, x: within(x)],
        lambda y, _: y,
        schedule,
        compile=False,
    )
    step = stages.step([params["a"], params["b"]], batch)
    grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)
    torch.testing.assert_close((whole.loss, whole.grads), (loss, grads))
    torch.testing.assert_close((step.loss, step.grads[0]), (loss, grads["a"]))


def test_one_hot_looks_at_no_data() -> None:
    def loss_fn(params: Any, batch: Any) -> Tensor:
        kinds = F.one_hot(batch["kind"], 3).to(torch.float64)
        hidden = fpipe.cut(kinds @ params["w"])
        return (hidden.sin() * kinds).square().mean()

    w, kind = torch.eye(3, dtype=torch.float64) * 2, torch.tensor([0, 2, 1, 1])
    pipe = fpipe.pipeline(
        loss_fn, schedule=fpipe.schedules.gpipe(ranks=2, microbatches=2), compile=False
    )
    loss, grads = pipe.step({"w": w}, {"kind": kind})
    expected, value = torch.func.grad_and_value(loss_fn)({"w": w}, {"kind": kind})
    torch.testing.assert_close((loss, grads), (value, expected))


def test_assignment_to_a_slice_moves_no_cut() -> None:
    """The rewrite of an assignment adds nodes; counted again, they pushed others over the cut."""

    def loss_fn(params: Any, batch: Tensor) -> Tensor:
        x = batch * params["scale"]
        for column in range(3):
            x[:, column] = batch[:, column] * params["scale"]
        x = fpipe.cut(x @ params["before"])
        return (x @ params["after"]).square().mean()

    params = {name: torch.eye(3) + 1 for name in ("before", "after")} | {"scale": torch.tensor(2.0)}
    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    loss, grads = pipe.step(params, torch.ones(4, 3))
    assert pipe._engine.readers() == {(0, 0): (1,), (0, 1): (0,), (0, 2): (0,)}
    expected, whole = torch.func.grad_and_value(loss_fn)(params, torch.ones(4, 3))
    torch.testing.assert_close((loss, grads), (whole, expected))


def test_values_of_stages_that_are_alike_are_told_apart() -> None:
    """Stages that are alike share a trace: a reader of several took the same value for each."""

    def loss_fn(params: Any, batch: Any) -> Tensor:
        x, scores = batch, []
        for layer in params:
            x = torch.tanh(x @ layer["w"])
            scores.append(x @ layer["gate"])
            x = fpipe.cut(x + 1)
        seen = sum(n * score.square().mean() for n, score in enumerate(scores, 1))
        return x.square().mean() + seen

    torch.manual_seed(0)
    params = [{"w": torch.randn(3, 3), "gate": torch.randn(3, 2)} for _ in range(3)]
    schedule = fpipe.schedules.zb_h1(ranks=4, microbatches=1)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    batch = torch.randn(4, 3)
    loss, grads = pipe.step(params, batch)
    expected, whole = torch.func.grad_and_value(loss_fn)(params, batch)
    torch.testing.assert_close((loss, grads), (whole, expected))


def scripted(function: Any, how: str, *example: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch call it deprecated
        return torch.jit.trace(function, example) if how == "trace" else torch.jit.script(function)


@pytest.mark.parametrize("how", ["script", "trace"])
def test_function_of_torch_jit_keeps_its_gradient(how: str) -> None:
    # After some calls it runs a graph without gradients and a backward of its own, which is not
    # recorded: what it returned was taken to carry no gradient.
    act = scripted(twice_tanh, how, torch.ones(2))
    for _ in range(3):
        act(torch.ones(4, 3, requires_grad=True)).sum().backward()

    def loss_fn(params: Any, batch: Any) -> Tensor:
        x = fpipe.cut(act(batch["x"] @ params["a"]))
        return act(x @ params["b"]).square().mean()

    params, batch = make_network()
    pipe = fpipe.pipeline(
        loss_fn, schedule=fpipe.schedules.zb_h1(ranks=2, microbatches=1), compile=False
    )
    compiled = torch.jit.ScriptFunction.__call__
    step = pipe.step(params, batch)
    assert torch.jit.ScriptFunction.__call__ is compiled
    grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)
    torch.testing.assert_close((step.loss, step.grads), (loss, grads))


def twice_tanh(x: Tensor) -> Tensor:
    return x.tanh() * 2


def test_compiled_module_of_torch_jit_is_refused() -> None:
    layer = scripted(torch.nn.Tanh(), "trace", torch.ones(2))
    pipe = fpipe.pipeline(
        lambda w, x: layer(x * w).sum(),
        schedule=fpipe.schedules.gpipe(ranks=1, microbatches=1),
        compile=False,
    )
    with pytest.raises(
        fpipe.StageError,
        match=r"calls 'forward', which torch\.jit has compiled at .*test_cut\.py:\d+: its "
        r"derivative is not recorded; use the function or module that torch\.jit\.trace",
    ):
        pipe.step(torch.tensor(1.0), torch.ones(4))


def test_hook_on_a_gradient_is_called() -> None:
    # A cut would have lost it: it was refused.
    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        y = x * w
        y.register_hook(lambda gradient: gradient * 2)
        return y.sum()

    schedule = fpipe.schedules.gpipe(ranks=1, microbatches=1)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    assert pipe.step(torch.tensor(1.0), torch.ones(4)) == (4, 8)


@pytest.mark.parametrize("loss_fn", [language_model, partial(partial(language_model))])
def test_wrong_number_of_cuts_is_refused(loss_fn: Any, params: Any, batch: Any) -> None:
    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, in_dims=IN_DIMS, compile=False)
    with pytest.raises(
        fpipe.StageError, match=r"language_model executes 3 cuts, which make 4 stages.* has 2"
    ):
        pipe.step(params, batch)


def test_loss_that_is_no_scalar_is_refused() -> None:
    schedule = fpipe.schedules.gpipe(ranks=1, microbatches=2)
    pipe = fpipe.pipeline(lambda w, x: x * w, schedule=schedule, compile=False)
    with pytest.raises(fpipe.StageError, match=r"must return one floating-point scalar"):
        pipe.step(torch.tensor(1.0), torch.ones(4))


def test_generator_of_its_own_is_refused_with_its_place() -> None:
    own = torch.Generator()
    pipe = fpipe.pipeline(
        lambda w, x: (x * w + torch.rand(4, generator=own)).sum(),
        schedule=fpipe.schedules.gpipe(ranks=1, microbatches=1),
        compile=False,
    )
    with pytest.raises(
        fpipe.StageError, match=r"draws from a torch\.Generator of its own at .*test_cut\.py:\d+:"
    ):
        pipe.step(torch.tensor(1.0), torch.ones(4))


def test_seed_of_its_own_is_refused() -> None:
    def seeded(w: Tensor, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return (torch.rand(4) * w * x).sum()

    schedule = fpipe.schedules.gpipe(ranks=1, microbatches=1)
    pipe = fpipe.pipeline(seeded, schedule=schedule, compile=False)
    with pytest.raises(fpipe.StageError, match=r"seeded seeds torch's generator at .*: a step"):
        pipe.step(torch.tensor(1.0), torch.ones(4))


def test_choice_of_torch_cond_is_refused() -> None:
    # It was a KeyError of torch's: <TransformType.Grad: 2>.
    pipe = fpipe.pipeline(
        lambda w, x: torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (x * w,)).sum(),
        schedule=fpipe.schedules.gpipe(ranks=1, microbatches=1),
        compile=False,
    )
    with pytest.raises(
        fpipe.StageError,
        match=r"higher-order operator cond at .*test_cut\.py:\d+, .*torch\.where",
    ):
        pipe.step(torch.tensor(1.0), torch.ones(4))


def test_value_in_a_message_is_not_read() -> None:
    message = []

    def talking(w: Tensor, x: Tensor) -> Tensor:
        y = fpipe.cut(x * w)
        message.append(f"the sum is {y.sum()}")
        return y.square().sum()

    pipe = fpipe.pipeline(
        talking, schedule=fpipe.schedules.gpipe(ranks=2, microbatches=1), compile=False
    )
    assert pipe.step(torch.tensor(2.0), torch.ones(4)).loss == 16
    assert set(message) == {"the sum is a tensor of shape ()"}


def test_forward_of_a_loss_function_is_refused(params: Any, batch: Any) -> None:
    schedule = fpipe.schedules.gpipe(ranks=4, microbatches=2)
    pipe = fpipe.pipeline(language_model, schedule=schedule, in_dims=IN_DIMS, compile=False)
    with pytest.raises(fpipe.StageError, match=r"a loss and no output: .*has_aux=True.*forward"):
        pipe.forward(params, batch)


def test_loss_beside_one_function_is_refused() -> None:
    schedule = fpipe.schedules.gpipe(ranks=1, microbatches=1)
    with pytest.raises(fpipe.StageError, match=r"given beside one function of the whole model"):
        fpipe.pipeline(language_model, lambda y, b: y, schedule)


def test_devices_of_one_function(params: Any, batch: Any) -> None:
    """One for each rank; `tests/device` has several that differ."""
    schedule = fpipe.schedules.zbv(ranks=2, microbatches=2)
    options: dict[str, Any] = {"in_dims": IN_DIMS, "compile": False}
    expected = fpipe.pipeline(language_model, schedule=schedule, **options).step(params, batch)
    pipe = fpipe.pipeline(language_model, schedule=schedule, devices=["cpu", "cpu"], **options)
    with pytest.raises(fpipe.StageError, match=r"pipe\.place\(params, batch\)"):
        pipe.place(params)
    placed = pipe.place(params, batch)
    leaves = optree.tree_leaves(params)
    assert all(new is own for new, own in zip(optree.tree_leaves(placed), leaves, strict=True))
    assert_identical(pipe.step(placed, batch), expected)
    with pytest.raises(fpipe.StageError, match=r"devices has those of cpu and meta, but one"):
        fpipe.pipeline(language_model, schedule=schedule, devices=["cpu", "meta"])


def test_cut_function_compiles(params: Any, batch: Any) -> None:
    single = {key: value for key, value in params.items() if key != "count"}
    pipe = fpipe.pipeline(
        language_model,
        schedule=fpipe.schedules.one_f_one_b(ranks=4, microbatches=1),
        in_dims=IN_DIMS,
        compile=laid_out,
    )
    loss, grads = pipe.step(params, batch)
    expected_grads, expected = reference(params, batch)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads["table"], expected_grads["table"])
    assert set(single) < set(grads)


class Fixed(torch.autograd.Function):
    """Its backward returns a tensor that it closes over."""

    gradient = torch.full((3, 3), 2.0, dtype=torch.float64)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Fixed.gradient


def _fixed(p: Any, x: Tensor) -> Tensor:
    h = fpipe.cut(torch.tanh(x @ Fixed.apply(p[0])))
    return (h @ Fixed.apply(p[1])).square().mean()


def _twice_alike(p: Any, x: Tensor) -> Tensor:
    """Autograd adds up the same two gradients on two edges."""
    a, b = fpipe.cut(torch.tanh(x @ p[0])), torch.sigmoid(x @ p[1])
    return (a + b).sum() + (a + b).sum()


def _strided_part(p: Any, x: Tensor) -> Tensor:
    part = torch.tanh(x @ p[0]).chunk(2, 1)[0]
    return (fpipe.cut(part.as_strided((2, 2), (3, 1))) @ p[1][:2]).square().mean()


def _unsqueezed(p: Any, x: Tensor) -> Tensor:
    """It changes the shape of what expand() has made, and writes to nothing."""
    h = (x @ p[0]).sum(0).expand(4, 3)
    return (fpipe.cut(h.unsqueeze_(0)[0]) @ p[1]).square().mean()


@pytest.mark.parametrize("loss_fn", [_fixed, _twice_alike, _strided_part, _unsqueezed])
def test_divided_backward_equals_that_of_autograd(loss_fn: Any) -> None:
    """Each was refused, or without a gradient, when whole backwards were first divided."""
    params, batch = [rand(3, 3), rand(3, 3)], rand(4, 3)
    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=1)
    own = [leaf.clone().requires_grad_() for leaf in params]
    loss = loss_fn(own, batch)
    expected = fpipe.Step(loss.detach(), list(torch.autograd.grad(loss, own)))
    assert_same(
        fpipe.pipeline(loss_fn, schedule=schedule, compile=False).step(params, batch), expected
    )


def test_loss_that_cannot_be_differentiated_is_refused_beside_aux() -> None:
    """Its gradients were zeros."""

    def loss_fn(p: Any, x: Tensor) -> Any:
        h = fpipe.cut(x @ p[0])
        total = (h @ p[1]).sum()
        loss = total * total
        total.add_(1)
        return loss, h

    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=1)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, has_aux=True, compile=False)
    with pytest.raises(
        fpipe.StageError, match="writes in place to a value that its backward needs"
    ):
        pipe.step([rand(3, 3), rand(3, 3)], rand(4, 3))
