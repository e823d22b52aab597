"""Frozen parameters: no gradient, and nothing that serves one."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad_and_value

import fpipe
from fpipe import Action, BatchError, Op, Schedule, ScheduleError, StageError, pytree, schedules
from fpipe.program.program import Compute, Program, Send
from tests import state_model as stateful
from tests.cut_model import IN_DIMS, language_model, make_batch, make_params
from tests.models import apply, assert_identical, assert_same, mean_square, rand

ONE_F_ONE_B = schedules.one_f_one_b(ranks=4, microbatches=3)


def adapted(p: Any, x: Any) -> Tensor:
    """A layer with a low-rank adapter."""
    x = x["x"] if isinstance(x, dict) else x
    return torch.tanh(x @ p["w"] + x @ p["lora"]["down"] @ p["lora"]["up"])


def adapters(stages: int = 4) -> tuple[list[Any], Any]:
    params = [
        {"w": rand(3, 3) * (s + 1), "lora": {"down": rand(3, 1) + s, "up": rand(1, 3)}}
        for s in range(stages)
    ]
    return params, {"x": rand(7, 3), "y": rand(7, 3) / 2}


def make(schedule: Schedule, trainable: Any, **options: Any) -> fpipe.Pipeline:
    stages = [adapted] * schedule.num_stages
    options = {"compile": False, "trainable": trainable} | options
    return fpipe.pipeline(stages, mean_square, schedule, **options)


def reference(params: Any, batch: Any, trained: list[bool]) -> fpipe.Step:
    """Of the plain function, with None for leaves that are not trained."""
    leaves, spec = pytree.flatten(params)

    def whole(own: list[Tensor]) -> Tensor:
        chosen = iter(own)
        full = [next(chosen) if flag else v for v, flag in zip(leaves, trained, strict=True)]
        return mean_square(
            apply([adapted] * len(params), pytree.unflatten(spec, full), batch), batch
        )

    found, value = grad_and_value(whole)([v for v, t in zip(leaves, trained, strict=True) if t])
    grads = iter(found)
    return fpipe.Step(value, pytree.unflatten(spec, [next(grads) if t else None for t in trained]))


def computed(programs: tuple[Program, ...]) -> Counter[tuple[int, str]]:
    """How often each stage runs each op."""
    return Counter(
        (i.action.stage, str(i.action.op))
        for program in programs
        for i in program.instructions
        if isinstance(i, Compute)
    )


def sent(programs: tuple[Program, ...]) -> Counter[tuple[int, int, str]]:
    """How many messages go from rank to rank, forwards and backwards."""
    return Counter(
        (i.message.source, i.message.target, str(i.message.action.op))
        for program in programs
        for i in program.instructions
        if isinstance(i, Send)
    )


@pytest.mark.parametrize("remat", ["none", "full"])
def test_adapters_alone_are_trained(remat: str) -> None:
    params, batch = adapters()
    expected = reference(params, batch, [True, True, False] * 4)
    by_path = make(ONE_F_ONE_B, lambda path: "lora" in path, remat=remat)
    by_prefix = make(ONE_F_ONE_B, [{"w": False, "lora": True}] * 4, remat=remat)
    zero_bubble = schedules.zb_h1(ranks=4, microbatches=3)
    for schedule in (ONE_F_ONE_B, zero_bubble, schedules.zbv(ranks=2, microbatches=3)):
        step = by_path.with_schedule(schedule).step(params, batch)
        assert_same(step, expected)
        assert_identical(by_prefix.with_schedule(schedule).step(params, batch), step)


def test_a_frozen_start_runs_no_backward() -> None:
    params, batch = adapters()
    pipe = make(ONE_F_ONE_B, [False, False, True, True])
    assert_same(pipe.step(params, batch), reference(params, batch, [False] * 6 + [True] * 6))
    programs = pipe.programs(params, batch)
    assert computed(programs) == Counter(
        {(0, "F"): 3, (1, "F"): 3, (2, "F"): 3, (2, "B"): 3, (3, "F"): 3, (3, "B"): 3}
    )
    # Three messages forwards over each border, and backwards over the one between trained stages.
    assert sent(programs) == Counter(
        {(0, 1, "SEND_F"): 3, (1, 2, "SEND_F"): 3, (2, 3, "SEND_F"): 3, (3, 2, "SEND_B"): 3}
    )
    assert [len(program.results.grads) for program in programs] == [0, 0, 3, 3]


def test_a_frozen_end_passes_gradients_on_and_has_none() -> None:
    params, batch = adapters()
    pipe = make(schedules.zb_h1(ranks=4, microbatches=3), [True, False, False, False])
    assert_same(pipe.step(params, batch), reference(params, batch, [True] * 3 + [False] * 9))
    count = computed(pipe.programs(params, batch))
    assert [count[stage, "W"] + count[stage, "B"] for stage in (1, 2, 3)] == [0, 0, 0]
    assert [count[stage, "I"] for stage in (1, 2, 3)] == [3, 3, 3]


def test_frozen_parameters_need_no_memory_for_gradients() -> None:
    params, batch = adapters()
    sums = []
    for choice in (None, lambda path: "lora" in path):
        programs = make(ONE_F_ONE_B, choice).programs(params, batch)
        slots = [{slot for *_, slot in program.results.grads} for program in programs]
        # A slot is filled again and again; what is in it at the end was put there last.
        last = [{slot: size for (_, slot), size in p.sizes.items()} for p in programs]
        sums.append([sum(last[rank][s] for s in own) for rank, own in enumerate(slots)])
    # A gradient of w has 9 numbers.
    assert all(full - some >= 9 * 8 for full, some in zip(*sums, strict=True))


def test_a_schedule_may_leave_out_what_nobody_needs() -> None:
    params, batch = adapters()
    rows = [[a for a in row if a.op == Op.F or a.stage > 1] for row in ONE_F_ONE_B.actions]
    lean = Schedule(ONE_F_ONE_B.placement, rows, name="lean")
    trainable = [False, {"w": False, "lora": False}, {"w": False, "lora": True}, True]
    whole = make(ONE_F_ONE_B, trainable).step(params, batch)
    assert_identical(make(lean, trainable).step(params, batch), whole)
    for other in (None, True, [False, True, True, True]):
        with pytest.raises(ScheduleError, match=r"stage . has F on microbatch 0"):
            make(lean, other)
    # What a function chooses is known with the parameters.
    late = make(ONE_F_ONE_B, lambda path: path[0] > 1).step(params, batch)
    assert_identical(make(lean, lambda path: path[0] > 1).step(params, batch), late)
    with pytest.raises(ScheduleError, match=r"lean has no W or B of stage 1 .* owes weight grad"):
        make(lean, lambda path: path[0] > 0).step(params, batch)
    assert Action(1, Op.B, 0) not in lean.actions[1]


@pytest.mark.parametrize("everything", [None, True, [True] * 4, lambda path: True])
def test_however_it_is_said_the_first_stage_owes_no_gradient_of_its_input(everything: Any) -> None:
    params, batch = adapters()
    rows = [
        [
            Action(0, Op.W if a.op == Op.B else a.op, a.microbatch) if a.stage == 0 else a
            for a in row
        ]
        for row in ONE_F_ONE_B.actions
    ]
    lean = Schedule(ONE_F_ONE_B.placement, rows, name="lean")
    whole = make(ONE_F_ONE_B, None).step(params, batch)
    assert_same(make(lean, everything).step(params, batch), whole)


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(
    "rows",
    [
        ["0F0 0F1 0F2", "1F0 1F1 1W1 1F2 1W0 1W2"],
        # Of one microbatch W alone, of another I and W, of another B.
        ["0F0 0F1 0F2", "1F0 1F1 1I1 1F2 1W0 1W1 1B2"],
    ],
)
def test_the_first_trained_stage_may_have_w_alone(rows: list[str], remat: str) -> None:
    # `verify` takes it, and making the programs ended in a KeyError: its I was missing.
    params, batch = adapters(2)
    lean = Schedule.from_text("\n".join(rows))
    pipe = make(lean, [False, True], remat=remat)
    assert_same(pipe.step(params, batch), reference(params, batch, [False] * 3 + [True] * 3))
    row = " ".join(
        str(i.action)
        for i in pipe.programs(params, batch)[1].instructions
        if isinstance(i, Compute)
    )
    assert row == rows[1]


def test_nothing_is_trained() -> None:
    params, batch = adapters()
    step = make(ONE_F_ONE_B, False).step(params, batch)
    assert_same(step, reference(params, batch, [True] * 12)._replace(grads=step.grads))
    assert pytree.flatten(step.grads)[0] == []
    assert not any(
        op != "F" for _, op in computed(make(ONE_F_ONE_B, False).programs(params, batch))
    )


@pytest.mark.parametrize(("word", "said"), [("laro", True), ("lora", False)])
def test_a_choice_that_nothing_matches_is_told(
    word: str, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    params, batch = adapters()
    make(ONE_F_ONE_B, lambda path: word in path).step(params, batch)
    warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert ["trainable= chooses no parameter" in text for text in warnings] == [True] * said


def test_history_of_autograd() -> None:
    params, batch = adapters()
    own = pytree.tree_map(lambda leaf: leaf.clone().requires_grad_(), params)
    make(ONE_F_ONE_B, lambda path: "lora" in path).value(own, batch).backward()
    expected = reference(params, batch, [True, True, False] * 4).grads
    assert_same(pytree.tree_map(lambda leaf: leaf.grad, own), expected)


# ── other pipelines ─────────────────────────────────────────────────────────────────────────────


def test_one_function() -> None:
    params, batch = make_params(), make_batch()
    make_pipe = partial(
        fpipe.pipeline, language_model, schedule=ONE_F_ONE_B, in_dims=IN_DIMS, compile=False
    )
    plain = make_pipe().step(params, batch)
    for frozen in ("table", "blocks"):
        check_frozen(frozen, make_pipe, params, batch, plain)


def check_frozen(frozen: str, make_pipe: Any, params: Any, batch: Any, plain: fpipe.Step) -> None:
    step = make_pipe(trainable={name: name != frozen for name in params}).step(params, batch)
    assert_same(step.loss, plain.loss)
    none = pytree.tree_map(lambda leaf: None, params[frozen])
    assert_same(step.grads, {**plain.grads, frozen: none})
    if frozen == "blocks":
        by_path = make_pipe(trainable=lambda path: path[0] != frozen)
        assert_identical(by_path.step(params, batch), step)


def test_a_module_whose_parameters_require_no_gradient() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    module[:2].requires_grad_(False)
    make_pipe = partial(
        fpipe.from_module,
        module,
        schedule=ONE_F_ONE_B,
        cuts=["0", "1", "2"],
        loss=lambda output, batch: output.square().mean(),
        compile=False,
    )
    params = {name: p.detach() for name, p in module.named_parameters()}
    batch = {"input": torch.ones(6, 3)}
    pipe = make_pipe()
    step = pipe.step(params, batch)
    module(batch["input"]).square().mean().backward()
    assert_same(step.grads, {n: p.grad for n, p in module.named_parameters()}, 1e-5)
    assert {stage for stage, op in computed(pipe.programs(params, batch)) if op != "F"} == {2, 3}


def test_an_ensemble_and_single_examples() -> None:
    params, batch = adapters()
    pipe = make(ONE_F_ONE_B, [False, False, {"w": False, "lora": True}, True])
    trained = [False] * 6 + [True, True, False] + [True] * 3
    stacked = pytree.tree_map(lambda leaf: torch.stack([leaf, 2 * leaf]), params)
    both = fpipe.vmap(pipe).step(stacked, batch)
    for member, factor in enumerate((1, 2)):
        own = pytree.tree_map(lambda leaf, factor=factor: factor * leaf, params)
        expected = reference(own, batch, trained)
        assert_same(both.loss[member], expected.loss)
        grads = pytree.tree_map(lambda leaf, member=member: leaf[member], both.grads)
        assert_same(grads, expected.grads)
    rows = fpipe.per_example_grads(pipe).step(params, batch)
    mean = pytree.tree_map(lambda leaf: leaf.mean(0), rows.grads)
    assert_same(mean, reference(params, batch, trained).grads)


def test_beside_a_state() -> None:
    """The choice is about the parameters; the state goes on."""
    params, state, batch = stateful.make_params(), stateful.make_state(), stateful.make_batch()
    frozen = sorted(params)[0]
    steps = [
        fpipe.pipeline(
            stateful.stateful_model,
            schedule=ONE_F_ONE_B,
            has_state=True,
            has_aux=True,
            compile=False,
            trainable=choice,
        ).step(params, state, batch)
        for choice in (None, lambda path: path[0] != frozen)
    ]
    whole, some = steps
    assert_same((some.loss, some.state), (whole.loss, whole.state))
    none = pytree.tree_map(lambda leaf: None, params[frozen])
    assert_same(some.grads, {**whole.grads, frozen: none})


def test_none_where_the_parameters_have_none() -> None:
    """As `tree_map` over the parameters gives it."""
    params = [None, {"w": torch.tensor(2.0), "b": None}]
    pipe = fpipe.pipeline(
        [lambda p, x: x.sin(), lambda p, x: x * p["w"]],
        lambda y, _: y.sum(),
        fpipe.schedules.gpipe(ranks=2, microbatches=2),
        trainable=pytree.tree_map(lambda leaf: True, params),
        compile=False,
    )
    assert pipe.step(params, torch.ones(2)).grads[1]["w"] == torch.ones(()).sin()


# ── refusals ────────────────────────────────────────────────────────────────────────────────────


def test_refusals() -> None:
    params, batch = adapters()
    with pytest.raises(StageError, match="trainable has the leaf 1, a int: it must be a pytree"):
        make(ONE_F_ONE_B, [True, 1, True, True])
    with pytest.raises(StageError, match=r"the leaf Fraction\(1, 2\), a fractions.Fraction"):
        make(ONE_F_ONE_B, [True, Fraction(1, 2), True, True])
    with pytest.raises(BatchError, match=r"trainable raised IndexError: .*, for the path \(0, "):
        make(ONE_F_ONE_B, lambda path: path[9]).step(params, batch)
    with pytest.raises(BatchError, match=r"trainable\[1\] is None for the leaf params\['"):
        make(ONE_F_ONE_B, [True, None, True, True]).step(params, batch)
    with pytest.raises(BatchError, match="trainable is a list of 2: it must be a bool, a list"):
        make(ONE_F_ONE_B, [True, False]).step(params, batch)
    with pytest.raises(BatchError, match="trainable is a dict of 1"):
        make(ONE_F_ONE_B, {"w": True}).step(params, batch)
    with pytest.raises(BatchError, match=r"trainable\[1\] must be a pytree prefix of params"):
        make(ONE_F_ONE_B, [True, {"v": True}, True, True]).step(params, batch)


# ── schedules that leave out what is not trained ────────────────────────────────────────────────


def layer(p: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ p)


def squares(y: Tensor, _: Any) -> Tensor:
    return y.square().mean()


@pytest.mark.parametrize("kind", ["function", "module"])
def test_of_one_function_a_schedule_may_leave_out_what_nobody_needs(kind: str) -> None:
    rows = [[a for a in row if a.op == Op.F or a.stage > 1] for row in ONE_F_ONE_B.actions]
    lean = Schedule(ONE_F_ONE_B.placement, rows, name="lean")
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    params = {name: p.detach() for name, p in module.named_parameters()}
    batch = {"input": torch.ones(6, 3)}

    def loss_fn(params: Any, batch: Any) -> Tensor:
        x = batch["input"]
        for number in range(4):
            own = params[f"{number}.weight"], params[f"{number}.bias"]
            x = torch.nn.functional.linear(x, *own)
            x = fpipe.cut(x) if number < 3 else x
        return x.square().mean()

    def make_pipe(schedule: Schedule, frozen: int) -> Any:
        if kind == "function":
            trainable = {name: int(name[0]) >= frozen for name in params}
            return fpipe.pipeline(loss_fn, schedule=schedule, compile=False, trainable=trainable)
        module.requires_grad_(True)[:frozen].requires_grad_(False)
        return fpipe.from_module(
            module, schedule=schedule, cuts=["0", "1", "2"], loss=squares, compile=False
        )

    step = make_pipe(lean, 2).step(params, batch)
    assert_identical(step, make_pipe(ONE_F_ONE_B, 2).step(params, batch))
    assert step.grads["1.weight"] is None and step.grads["2.weight"] is not None
    more = make_pipe(lean, 1)
    with pytest.raises(ScheduleError, match=r"lean has no W or B of stage 1 .* owes weight grad"):
        more.step(params, batch)
    assert_same(more.value(params, batch), step.loss)
    with pytest.raises(ScheduleError, match=r"stage 0 (has F on microbatch 0|.* owes weight grad)"):
        make_pipe(lean, 0).step(params, batch)
    halves = Schedule(lean.placement, [*lean.actions[:3], lean.actions[3][:-1]])
    with pytest.raises(ScheduleError, match=r"stage 3 has F on microbatch"):
        make_pipe(halves, 2)


def test_a_schedule_of_forwards_serves_evaluation() -> None:
    forwards = fpipe.schedules.forward_only(ranks=2, microbatches=2)
    params, x = [torch.eye(3), torch.eye(3)], torch.ones(4, 3)
    pipe = fpipe.pipeline([layer, layer], squares, forwards, compile=False)
    expected = layer(params[1], layer(params[0], x))
    assert_same(pipe.value(params, x), squares(expected, x))
    assert_same(pipe.forward(params, x), expected)
    with pytest.raises(ScheduleError, match=r"forward_only has no W or B of stage 0 \(layer\)"):
        pipe.step(params, x)
    training = pipe.with_schedule(fpipe.schedules.gpipe(ranks=2, microbatches=2))
    assert_same(training.step(params, x).loss, squares(expected, x))
    assert_same(training.with_schedule(forwards).value(params, x), squares(expected, x))
    frozen = fpipe.pipeline([layer, layer], squares, forwards, compile=False, trainable=False)
    assert frozen.step(params, x).grads == [None, None]
    part = Schedule(forwards.placement, [forwards.actions[0][:1], forwards.actions[1]])
    with pytest.raises(ScheduleError, match=r"microbatch 1"):
        fpipe.pipeline([layer, layer], squares, part, compile=False)
