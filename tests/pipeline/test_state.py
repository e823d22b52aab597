"""State goes through the microbatches in their order, whatever the schedule."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpipe
from fpipe import Action, Op, Schedule, schedules
from fpipe.nn import BatchStats, batch_norm, buffers_of, call, state_of
from tests.laid_out import laid_out
from tests.models import assert_identical, assert_same
from tests.state_model import (
    by_microbatch,
    make_batch,
    make_params,
    make_state,
    stateful_model,
    without_aux,
)

ONE = schedules.gpipe(ranks=1, microbatches=2)


def unpipelined(batch: dict[str, Tensor]) -> tuple[Tensor, Any, Any, Any]:
    """Loss, gradients, state and aux."""
    grads, (loss, (state, aux)) = torch.func.grad_and_value(by_microbatch, has_aux=True)(
        make_params(), make_state(), batch
    )
    return loss, grads, state, aux


@cache
def traced(remat: str) -> fpipe.Pipeline:
    """All schedules share its traces."""
    schedule = schedules.gpipe(ranks=4, microbatches=1)
    options: Any = {"has_state": True, "has_aux": True, "remat": remat, "compile": False}
    return fpipe.pipeline(stateful_model, schedule=schedule, **options)


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(
    "schedule",
    [
        schedules.one_f_one_b(ranks=4, microbatches=4),
        schedules.zb_h1(ranks=4, microbatches=4),
        schedules.zbv(ranks=2, microbatches=4),
        schedules.interleaved_1f1b(ranks=2, microbatches=4),
    ],
    ids=lambda s: s.name,
)
def test_state_is_what_the_microbatches_leave_one_after_the_other(
    schedule: Schedule, remat: str
) -> None:
    pipe = traced(remat).with_schedule(schedule)
    params, state, batch = make_params(), make_state(), make_batch(9)
    found = pipe.step(params, state, batch)
    assert isinstance(found, fpipe.StepStateAux)
    assert_same(tuple(found), unpipelined(batch))
    assert found.state["count"] == 7 + 4  # not once more for what remat computes again
    assert_same(state, make_state())
    assert found.state["fixed"] is not state["fixed"]
    assert_same(pipe.value(params, state, batch), found.loss)
    forward = pipe.forward(params, state, batch)
    assert isinstance(forward, fpipe.ForwardAux)
    assert_same(tuple(forward), (found.loss, found.aux))


def test_state_and_batch_may_come_by_name() -> None:
    pipe = state_pipe(without_aux, schedules.zbv(ranks=2, microbatches=4))
    params, state, batch = make_params(), make_state(), make_batch(9)
    expected = pipe.step(params, state, batch)
    assert_identical(pipe.step(params, batch=batch, state=state), expected)
    assert_identical(pipe.step(params, state, batch=batch), expected)
    with pytest.raises(fpipe.BatchError, match="by name batch: it takes params, state, batch, ea"):
        pipe.step(params, batch=batch)


def test_state_of_one_step_begins_the_next() -> None:
    schedule = schedules.zbv(ranks=2, microbatches=4)
    pipe = fpipe.pipeline(without_aux, schedule=schedule, has_state=True, compile=False)
    params, state, batch = make_params(), make_state(), make_batch(9)
    expected = state
    for _ in range(2):
        result = pipe.step(params, state, batch)
        assert isinstance(result, fpipe.StepState)
        expected = by_microbatch(params, expected, batch)[1][0]
        state = result.state
    assert_same(state, expected)
    assert state["count"] == 15


def turning(params: Tensor, state: Any, batch: Any) -> tuple[Tensor, Any]:
    """Leaves change places; one becomes a leaf of the batch, and another the same."""
    a, b, _, _ = state
    return (params * a * batch).sum(), (b, a, batch, batch)


def test_state_has_memory_of_its_own() -> None:
    pipe = fpipe.pipeline(turning, schedule=schedules.gpipe(ranks=1, microbatches=1),
                          has_state=True, in_dims=None, compile=False)  # fmt: skip
    params, batch = torch.tensor(2.0), torch.ones(3)
    state = (torch.zeros(3), torch.ones(3), torch.zeros(3), torch.zeros(3))
    found = pipe.step(params, state, batch).state
    assert_identical(found, (torch.ones(3), torch.zeros(3), batch, batch))
    for leaf in found:
        leaf.add_(5)
    assert_identical(state, (torch.zeros(3), torch.ones(3), torch.zeros(3), torch.zeros(3)))
    assert_identical(batch, torch.ones(3))
    assert not torch.equal(*found[:2]) and torch.equal(found[2], torch.full((3,), 6.0))


def test_state_of_compiled_stages() -> None:
    schedule = schedules.one_f_one_b(ranks=4, microbatches=4)
    pipe = fpipe.pipeline(
        stateful_model, schedule=schedule, has_state=True, has_aux=True, compile=laid_out
    )
    batch = make_batch()
    assert_same(tuple(pipe.step(make_params(), make_state(), batch)), unpipelined(batch))


# ── statistics of the whole batch ───────────────────────────────────────────────────────────────


def test_deferred_statistics_are_those_of_the_whole_batch() -> None:
    params, state, batch = make_params(), make_state(), make_batch(9)
    results = []
    for schedule in (
        schedules.zbv(ranks=2, microbatches=4),
        schedules.one_f_one_b(ranks=4, microbatches=4),
    ):
        pipe = fpipe.pipeline(
            stateful_model,
            schedule=schedule,
            has_state=True,
            has_aux=True,
            batch_norm="deferred",
            remat="full",
            compile=False,
        )
        results.append(pipe.step(params, state, batch))
    assert_identical(results[0].state, results[1].state)
    found = results[0]
    # What the first layer normalises does not depend on how the batch is split.
    module = nn.BatchNorm1d(3).double()
    module.running_mean, module.running_var = (leaf.clone() for leaf in state["first"])
    module(F.conv1d(batch["x"], params["convolution"]))
    assert_same(found.state["first"], BatchStats(module.running_mean, module.running_var))
    # What the second one does is normalised by microbatches before it: aux has it all.
    mean, var = (leaf.clone() for leaf in state["second"])
    F.batch_norm(found.aux["inside"], mean, var, training=True, momentum=0.3)
    assert_same(found.state["second"], BatchStats(mean, var))
    # Everything else is as without deferring.
    loss, grads, plain, _ = unpipelined(batch)
    assert_same((found.loss, found.grads), (loss, grads))
    assert_same(found.state["drift"], plain["drift"])
    assert not torch.allclose(found.state["first"].var, plain["first"].var)


def test_statistics_that_torch_writes_to_come_back() -> None:
    """Torch's batch norm writes to them though its schema does not say so; `x` is read after it."""

    def loss_fn(w: Tensor, state: Tensor, x: Tensor) -> Any:
        mean, var = state[0].clone(), state[1].clone()
        before = mean * 2
        y = F.batch_norm(x * w, mean, var, training=True, momentum=0.5)
        return (y * mean - before).square().mean(), torch.stack([mean, var])

    w, state, x = torch.tensor(3.0), torch.tensor([[1.0], [4.0]]), torch.tensor([[1.0], [3.0]])
    pipe = fpipe.pipeline(
        loss_fn, schedule=schedules.gpipe(ranks=1, microbatches=1), has_state=True, compile=False
    )
    grad, (loss, new) = torch.func.grad_and_value(loss_fn, has_aux=True)(w, state, x)
    assert_same(tuple(pipe.step(w, state, x)), (loss, grad, new))
    assert_same(new, torch.tensor([[3.5], [11.0]]))


def test_statistics_that_are_a_part_of_a_tensor_are_refused() -> None:
    def loss_fn(w: Tensor, state: Tensor, x: Tensor) -> Any:
        new = state.clone()
        return F.batch_norm(x * w, new[0], new[1], training=True).mean(), new

    with pytest.raises(fpipe.StageError, match=r"statistics that are a view of another tensor: cl"):
        state_pipe(loss_fn).step(torch.tensor(1.0), torch.ones(2, 1), torch.ones(4, 1))


def test_deferred_statistics_of_a_layer_that_is_not_used_stay() -> None:
    def loss_fn(w: Tensor, state: BatchStats, x: Tensor) -> Any:
        y, state = batch_norm(x * w, state, training=False)
        return y.square().mean(), state

    pipe = fpipe.pipeline(
        loss_fn, schedule=ONE, has_state=True, batch_norm="deferred", compile=False
    )
    state = BatchStats(torch.tensor([1.0]), torch.tensor([4.0]))
    result = pipe.step(torch.tensor(3.0), state, torch.ones(4, 1))
    assert_identical(result.state, state)
    torch.testing.assert_close(result.loss, torch.tensor(1.0), rtol=1e-4, atol=0)


# ── modules ─────────────────────────────────────────────────────────────────────────────────────


def make_module() -> nn.Sequential:
    torch.manual_seed(2)
    layers = [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1)]
    return nn.Sequential(*layers).double()


def module_loss(
    module: nn.Module, params: dict[str, Tensor], state: dict[str, Any], batch: Tensor
) -> Any:
    y, state = call(module, params, state, batch)
    return y.square().mean(), state


@pytest.mark.parametrize("deferred", [False, True])
def test_buffers_of_a_module_are_a_state(deferred: bool) -> None:
    module, twin = make_module(), make_module()
    x = torch.randn(8, 1, 4, 4).double()
    params = {name: p.detach() for name, p in module.named_parameters()}
    pipe = fpipe.pipeline(
        partial(module_loss, module),
        schedule=schedules.gpipe(ranks=1, microbatches=4),
        has_state=True,
        batch_norm="deferred" if deferred else "microbatch",
        compile=False,
    )
    loss, grads, state = pipe.step(params, state_of(module), x)
    total = torch.stack([twin(part).square().mean() for part in x.split(2)]).mean()
    total.backward()
    assert_same(loss, total)
    assert_same(grads, {name: p.grad for name, p in twin.named_parameters()})
    if deferred:
        whole = make_module()
        whole(x)
        twin.load_state_dict(whole.state_dict())
    assert_same(buffers_of(state), dict(twin.named_buffers()))
    assert_same(dict(module.named_buffers()), dict(make_module().named_buffers()))


def test_module_in_evaluation_keeps_its_state() -> None:
    module = make_module().eval()
    params = {name: p.detach() for name, p in module.named_parameters()}
    x = torch.randn(4, 1, 4, 4).double()
    y, state = call(module, params, state_of(module), x)
    assert_same(y, module(x))
    assert_identical(buffers_of(state), dict(module.named_buffers()))


# ── refusals ────────────────────────────────────────────────────────────────────────────────────


def state_pipe(loss_fn: Any, schedule: Schedule = ONE, **options: Any) -> fpipe.Pipeline:
    return fpipe.pipeline(loss_fn, schedule=schedule, has_state=True, compile=False, **options)


@pytest.mark.parametrize(
    ("returned", "rule"),
    [
        (lambda loss, s: loss, r"with has_state=True loss_fn\(params, state, batch\) must return"),
        (lambda loss, s: (loss, (s, s)), r"returns a state of another structure than it was given"),
        (lambda loss, s: (loss, s[None]), r"state as float32\[1\], but was given float32\[\]"),
        (lambda loss, s: (loss, s.long()), r"state as int64\[\], but was given float32\[\]"),
        (lambda loss, s: (loss, 1.0), r"returns state=1.0, a float: state must be a pytree"),
        (lambda loss, s: (loss, s.add_(1)), r"writes in place to its input state"),
    ],
)
def test_wrong_state_is_refused(returned: Any, rule: str) -> None:
    pipe = state_pipe(lambda w, s, x: returned((x * w).sum(), s))
    with pytest.raises(fpipe.StageError, match=rule):
        pipe.step(torch.tensor(1.0), torch.tensor(0.0), torch.ones(4))


def test_state_that_two_stages_share_is_refused() -> None:
    def loss_fn(w: Tensor, state: dict[str, Tensor], x: Tensor) -> Any:
        x = fpipe.cut(x * w + state["n"])
        return (x * w).sum(), {"n": state["n"] + x.sum()}

    pipe = state_pipe(loss_fn, schedules.one_f_one_b(ranks=2, microbatches=2))
    rule = r"reads state\['n'\] in stage 0 and 1 and makes its new value in stage 1: .* one stage"
    with pytest.raises(fpipe.StageError, match=rule):
        pipe.step(torch.tensor(1.0), {"n": torch.tensor(0.0)}, torch.ones(4))


def test_state_that_never_changes_may_be_read_in_every_stage() -> None:
    def loss_fn(w: Tensor, state: dict[str, Tensor], x: Tensor) -> Any:
        x = fpipe.cut(x * w + state["shift"])
        x = x * w * state["shift"]
        return x.sum(), {"n": state["n"] + x.detach().sum(), "shift": state["shift"].clone()}

    pipe = state_pipe(loss_fn, schedules.one_f_one_b(ranks=2, microbatches=2), reduction="sum")
    w, x = torch.tensor(2.0), torch.arange(4.0)
    state = {"n": torch.tensor(1.0), "shift": torch.tensor(3.0)}
    result = pipe.step(w, state, x)
    grad, loss = torch.func.grad_and_value(lambda w: loss_fn(w, state, x)[0])(w)
    assert_same(tuple(result), (loss, grad, {"n": 1 + loss, "shift": state["shift"]}))
    assert result.state["shift"] is not state["shift"]


def test_schedule_whose_forwards_change_places_is_refused() -> None:
    actions = [Action(0, op, m) for op in (Op.F, Op.B) for m in (1, 0)]
    schedule = Schedule([0], [actions], name="turned")
    with pytest.raises(fpipe.StageError, match=r"schedule turned runs 0F0 after 0F1: .* in the or"):
        state_pipe(without_aux, schedule)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(fpipe.StageError, match=r"batch_norm='late' must be one of 'microbatch', "):
        state_pipe(without_aux, batch_norm="late")
    with pytest.raises(fpipe.StageError, match=r'batch_norm="deferred" is about running statist'):
        fpipe.pipeline(without_aux, schedule=ONE, batch_norm="deferred")
    with pytest.raises(fpipe.StageError, match=r"has_state=True is for one function of the whole"):
        fpipe.pipeline([lambda p, x: x], lambda y, b: y.sum(), ONE, has_state=True)
    pipe = state_pipe(without_aux)
    with pytest.raises(fpipe.BatchError, match=r"got 2 arguments, but takes 3: params, sta"):
        pipe.step(make_params(), make_batch())


def test_state_leaf_that_is_no_tensor_is_refused() -> None:
    pipe = state_pipe(without_aux)
    with pytest.raises(fpipe.BatchError, match=r"^state\['count'\]=7 is an int"):
        pipe.step(make_params(), make_state() | {"count": 7}, make_batch())


def test_state_that_some_microbatches_alone_bring_up_to_date() -> None:
    def counting(w: Tensor, count: Tensor, x: Tensor) -> Any:
        y = fpipe.cut(x * w)
        return y.mean(), count if len(x) == 1 else count + y.detach().sum()

    schedule = schedules.gpipe(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(counting, schedule=schedule, compile=False, has_state=True)
    for parts in (torch.ones(3), fpipe.Microbatches([torch.ones(1), torch.ones(2)])):
        with pytest.raises(fpipe.StageError, match="brings other leaves of the state up to date"):
            pipe.step(torch.tensor(2.0), torch.tensor(0.0), parts)


def test_state_that_is_handed_on_through_many_microbatches() -> None:
    def swapping(params: Any, state: Any, batch: Tensor) -> Any:
        h = fpipe.cut(batch * params)
        return h.mean(), {"a": state["b"], "b": state["a"]}

    count = 401
    schedule = schedules.gpipe(ranks=2, microbatches=count)
    pipe = fpipe.pipeline(swapping, schedule=schedule, compile=False, has_state=True)
    state = {"a": torch.tensor(3.0), "b": torch.tensor(4.0)}
    found = pipe.step(torch.tensor(2.0), state, torch.ones(count)).state
    assert (found["a"].item(), found["b"].item()) == (4.0, 3.0)
