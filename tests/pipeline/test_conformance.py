"""Every schedule, under every remat policy, gives what `torch.func.grad_and_value` gives.

A family joins by existing: the tests run over `fpipe.schedules.FAMILIES`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import fpipe
from fpipe import Action, Op, Schedule, schedules
from tests.models import (
    MODELS,
    Model,
    adapted,
    apply,
    assert_identical,
    assert_same,
    conv,
    gpt,
    gpt_embed,
    head,
    mlp,
    normed,
    unpipelined,
)

FAMILIES = list(schedules.FAMILIES)


def keep_products(node: fx.Node) -> bool:
    """A remat policy of a user's own: keep what is dear to compute."""
    return any(word in str(node.target) for word in ("mm", "convolution", "attention"))


REMAT: dict[str, Any] = {
    "none": "none",
    "full": "full",
    "except_last": "except_last",
    "callable": keep_products,
}


@cache
def expected_of(make: Callable[..., Model], num_stages: int, rows: int) -> fpipe.Step:
    return unpipelined(*make(num_stages, rows))


def run(model: Model, schedule: Schedule, **options: Any) -> fpipe.Step:
    options = {"compile": False} | options
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, **options)
    return pipe.step(model.params, model.batch)


@cache
def traced_once(
    make: Callable[..., Model], num_stages: int, remat: str | tuple[str, ...]
) -> fpipe.Pipeline:
    """A pipeline of a model, whose traces serve all schedules of so many stages.

    The name of the policy is that of all stages, or there is one for each.
    """
    policy = REMAT[remat] if isinstance(remat, str) else tuple(REMAT[name] for name in remat)
    stages = range(num_stages)
    there = [fpipe.Action(stage, Op.F, 0) for stage in stages]
    back = [fpipe.Action(stage, Op.B, 0) for stage in reversed(stages)]
    one = Schedule([0] * num_stages, [[*there, *back]])
    model = make(num_stages, 2)
    return fpipe.pipeline(model.stages, model.loss, one, compile=False, remat=policy)


def check_policy(
    make: Callable[..., Model], schedule: Schedule, rows: int, remat: str | tuple[str, ...]
) -> None:
    model = make(schedule.num_stages, rows)
    pipe = traced_once(make, schedule.num_stages, remat).with_schedule(schedule)
    expected = expected_of(make, schedule.num_stages, rows)
    assert_same(pipe.step(model.params, model.batch), expected)


def models_in_turn(family: str) -> list[Callable[..., Model]]:
    """Both models; families that are neighbours, which have one placement, begin with another."""
    return [gpt, conv] if FAMILIES.index(family) % 2 else [conv, gpt]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_policy_and_model_equals_the_unpipelined_function(family: str) -> None:
    schedule = schedules.get(family, ranks=2, microbatches=4)
    for make, remat in zip(itertools.cycle(models_in_turn(family)), REMAT, strict=False):
        check_policy(make, schedule, 8, remat)


# Ranks, microbatches and rows: one rank with one microbatch and with several; microbatches of two
# sizes; fewer microbatches than ranks. Each model has a policy, and each family one of the models.
SIZES = [
    (1, 1, 2, {mlp: "none", conv: "full"}),
    (1, 3, 5, {mlp: "except_last", conv: "callable"}),
    (3, 5, 11, {mlp: "full", conv: "none"}),
    (4, 2, 4, {mlp: "callable", conv: "except_last"}),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("ranks", "microbatches", "rows", "policies"), SIZES)
def test_schedules_of_every_size_equal_the_unpipelined_function(
    ranks: int,
    microbatches: int,
    rows: int,
    policies: dict[Callable[..., Model], str],
    family: str,
) -> None:
    schedule = schedules.get(family, ranks=ranks, microbatches=microbatches)
    make = mlp if FAMILIES.index(family) % 2 else conv
    check_policy(make, schedule, rows, policies[make])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_for_each_stage_equals_the_unpipelined_function(family: str) -> None:
    schedule = schedules.get(family, ranks=2, microbatches=3)
    each = tuple(itertools.islice(itertools.cycle(REMAT), schedule.num_stages))
    check_policy(adapted, schedule, 6, each[::-1])


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_made_of_parameters_equal_the_unpipelined_function(family: str, remat: str) -> None:
    """Microbatches of two sizes."""
    schedule = schedules.get(family, ranks=2, microbatches=3)
    check_policy(adapted, schedule, 7, remat)


@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_equals_the_unpipelined_function(family: str) -> None:
    """`value` and `forward`, for every placement: V-shaped ones and several stages a rank too."""
    schedule = schedules.get(family, ranks=2, microbatches=2)
    model = conv(schedule.num_stages, 5)
    pipe = traced_once(conv, schedule.num_stages, "none").with_schedule(schedule)
    expected = apply(model.stages, model.params, model.batch)
    assert_same(pipe.forward(model.params, model.batch), expected)
    assert_same(pipe.value(model.params, model.batch), model.loss(expected, model.batch))


@pytest.fixture
def vectors() -> Iterator[None]:
    """Inductor uses the vector instructions of this machine, which tests/conftest.py turns off.

    They are not tried first. On a busy machine Inductor may give up the trial and take others, and
    code that its cache keeps for those writes out of bounds where the better ones are found again.
    """
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    before = pick_vec_isa()
    forget_vector_instructions()
    with config.patch({"cpp.vec_isa_ok": True}):
        yield
    forget_vector_instructions()
    # What the next tests of this process compile is kept for others, as code without them.
    assert pick_vec_isa() == before


def forget_vector_instructions() -> None:
    """What Inductor has found, some of which it keeps whatever the setting is."""
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    for isa in cpu_vec_isa.supported_vec_isa_list:
        clear = getattr(type(isa).__bool__, "cache_clear", None)
        if clear is not None:
            clear()


def perceptron(p: Any, x: Tensor) -> Tensor:
    """The block of a GPT without attention, and the head."""
    own = p["block"]
    return head(p["head"], x + F.gelu(normed(own["norm2"], x) @ own["up"]) @ own["down"])


def gpt_without_attention(rows: int, dtype: torch.dtype) -> Model:
    """Two stages, the embedding and what is behind attention: fewer kernels to compile."""
    model = gpt(1, rows, dtype)
    (own,) = model.params
    used = {name: own["block"][name] for name in ("norm2", "up", "down")}
    params = [own["embed"], {"block": used, "head": own["head"]}]
    return model._replace(stages=[gpt_embed, perceptron], params=params)


@pytest.mark.inductor
@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize(
    ("make", "family", "microbatches", "remat"),
    [(gpt_without_attention, "zb_h1", 1, "none"), (partial(mlp, 1), "one_f_one_b", 2, "full")],
    ids=["gpt-zb_h1-none", "mlp-one_f_one_b-full"],
)
def test_compiled_step_in_float32(
    make: Callable[..., Model], family: str, microbatches: int, remat: str
) -> None:
    """Gradients of several microbatches are added in the small model alone."""
    model = make(4, torch.float32)
    schedule = schedules.get(family, ranks=len(model.stages), microbatches=microbatches)
    step = run(model, schedule, remat=remat, compile=True)
    assert_same(step, unpipelined(*model), tolerance=2e-5)


def split(schedule: Schedule) -> Schedule:
    """The same schedule with each B as an I and the W right behind it."""
    rows = [
        [
            part
            for action in row
            for part in (
                [action._replace(op=Op.I), action._replace(op=Op.W)]
                if action.op == Op.B
                else [action]
            )
        ]
        for row in schedule.actions
    ]
    return Schedule(schedule.placement, rows)


def late_weights(schedule: Schedule) -> Schedule:
    """The same schedule with I for B, and every W at the end, in the order of the B."""
    rows = []
    for row in schedule.actions:
        early = [action._replace(op=Op.I) if action.op == Op.B else action for action in row]
        rows.append([*early, *(a._replace(op=Op.W) for a in row if a.op == Op.B)])
    return Schedule(schedule.placement, rows)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("edit", [split, late_weights])
def test_split_backward_is_bitwise_the_whole_backward(name: str, edit: Any) -> None:
    schedule = schedules.one_f_one_b(ranks=3, microbatches=4)
    model = MODELS[name](3, 8)
    assert_identical(run(model, edit(schedule)), run(model, schedule))


@pytest.mark.parametrize("name", MODELS)
def test_remat_is_bitwise_without_effect(name: str) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=3)
    model = MODELS[name](4, 6)
    kept = run(model, schedule, remat="none")
    for remat in ("full", "except_last", keep_products):
        assert_identical(run(model, schedule, remat=remat), kept)


@dataclass
class KeepSmall:
    """A policy that is no function, and that nothing can be kept by, for it may change."""

    limit: int

    def __call__(self, node: fx.Node) -> bool:
        return bool(node.meta["val"].nbytes <= self.limit)


def test_a_policy_need_not_be_hashable() -> None:
    model = mlp(2, 4)
    step = run(model, schedules.zb_h1(ranks=2, microbatches=2), remat=KeepSmall(100))
    assert_same(step, unpipelined(*model))


def test_a_schedule_by_hand() -> None:
    def row(text: str) -> list[Action]:
        return [Action.parse(word) for word in text.split()]

    schedule = Schedule(
        [1, 0, 1],
        [row("1F1 1F0 1I0 1B1 1W0"), row("0F1 0F0 2F1 2F0 2I0 2B1 0B0 0I1 2W0 0W1")],
    )
    model = gpt(3, 5)
    assert_same(run(model, schedule), unpipelined(*model))
