"""The norm of all gradients, in one process and over several."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fpipe
from fpipe import FpipeError, Schedule, pytree, schedules
from tests.cut_model import make_batch, make_params
from tests.distributed import actors
from tests.distributed.actors import Group
from tests.distributed.crew import Crew, attempt, values
from tests.distributed.test_faults import assert_good, failures
from tests.distributed.test_same_answers import merge
from tests.models import assert_identical, assert_same, unpipelined


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_norm_and_clipping_over_ranks(crew: Crew, dtype: torch.dtype, tolerance: float) -> None:
    schedule = schedules.zbv(ranks=3, microbatches=2)
    parts = values(crew.run(actors.norms, schedule, dtype, ranks=range(3)))
    whole = actors.norms(None, schedule, dtype)
    merged = [merge([part[call] for part in parts], schedule) for call in range(5)]
    assert_same(merged, whole, tolerance)  # squares are added up in another order
    norm, before, after, clipped, kept = merged
    model = actors.model_of("mlp", schedule.num_stages, 6, dtype)
    leaves = pytree.flatten(kept.grads)[0]
    assert all(leaf.dtype == dtype for leaf in leaves)
    expected = torch.nn.utils.get_total_norm([leaf.double() for leaf in leaves])
    scale = expected / 2 / (expected + 1e-6)
    assert_same([norm.double(), after.double()], [expected, expected * scale], tolerance)
    assert_identical(norm, before)
    assert_same(kept.grads, unpipelined(*model).grads, max(tolerance, 1e-10) * 10)
    assert_same(clipped.grads, pytree.tree_map(lambda v: v * scale, kept.grads), tolerance)


def shared_norm(group: Group, schedule: Schedule) -> list[Any]:
    """Norms of gradients of one function, whose ends read one table on two ranks."""
    pipe = actors.recorded_function(group, schedule)
    grads = pipe.step(make_params(), make_batch()).grads
    norm = fpipe.global_norm(grads, pipe=pipe)
    clipped = fpipe.clip_by_global_norm(grads, norm.item() / 2, pipe=pipe)
    leaves = pytree.flatten(grads)[0]
    mixed = attempt(
        partial(fpipe.global_norm, leaves, pipe=pipe)
    )  # numbered by each rank for itself
    return [norm, clipped.norm, clipped.grads["table"], mixed, attempt(fpipe.global_norm, grads)]


def test_a_gradient_that_several_ranks_hold_counts_once(crew: Crew) -> None:
    schedule = schedules.one_f_one_b(ranks=4, microbatches=4)
    norm, _, table, mixed, _ = shared_norm(None, schedule)
    grads = actors.recorded_function(None, schedule).step(make_params(), make_batch())
    expected = torch.nn.utils.get_total_norm(pytree.flatten(grads.grads)[0])
    assert_same([norm, mixed.value], [expected, expected], 1e-12)
    for rank, part in enumerate(values(crew.run(shared_norm, schedule))):
        assert_same(part[:2], [norm, norm], 1e-12)
        if rank in (0, 3):
            assert_same(part[2], table, 1e-12)
        found = r"grads\[0\] is another gradient on rank 1 than on rank 0, with a norm of "
        assert re.match(found, part[3].error.text)
        assert part[3].error.kind == "FpipeError"
        assert "pass pipe=pipe" in part[4].error.text


def test_a_norm_that_is_not_finite_is_not_hidden(crew: Crew) -> None:
    # As torch's: the scale is 0.
    scaled = [None, torch.zeros(2), torch.tensor([0.0, torch.nan])]
    answers = values(crew.run(actors.infinite, ranks=range(3)))
    for (norm, (grads,), part), expected in zip(answers, scaled, strict=True):
        assert norm.isinf()
        torch.testing.assert_close(grads, expected, equal_nan=True)
        assert "pass pipe=pipe" in part.error.text


def test_a_rank_that_steps_where_others_ask_for_a_norm(crew: Crew) -> None:
    answers = values(crew.run(actors.norm_and_step, ranks=range(3)))
    for error in failures(answers, 0):
        assert error.rank == 1
        assert "rank 1 called fpipe.global_norm or fpipe.clip_by_global_norm, but" in error.text
    assert_good(answers, 1)


def norms_refused_on_one(group: dist.ProcessGroup, schedule: Schedule) -> list[Any]:
    """Rank 1 passes what is no gradient, and rank 0 a bound that is none; then both are right."""
    model, pipe = actors.recorded(group, "mlp", schedule, 6)
    params, batch = pipe.local(model.params), model.batch
    grads = pipe.step(params, batch).grads
    norm = partial(fpipe.global_norm, pipe=pipe)
    clip = partial(fpipe.clip_by_global_norm, grads, pipe=pipe)
    return [
        attempt(norm, [torch.ones(2, dtype=torch.int64)] if group.rank() == 1 else grads),
        attempt(clip, 1.0 if group.rank() else -1.0),
        norm(grads),
        pipe.step(params, batch).loss,
    ]


def test_gradients_that_one_rank_refuses(crew: Crew) -> None:
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    here, there = values(crew.run(norms_refused_on_one, schedule, ranks=range(2)))
    for answers, call, at_fault, reason in (
        ((here, there), 0, 1, "is not a floating-point tensor"),
        ((there, here), 1, 0, "max_norm=-1.0 must be a positive number"),
    ):
        other, own = (answer[call].error for answer in answers)
        assert own.kind == "FpipeError" and reason in own.text
        assert other.kind == "PipelineError" and other.rank == at_fault and reason in other.text
        assert other.text.startswith(f"rank {at_fault} cannot take the norm of its gradients")
    assert_identical(here[2:], there[2:])


def test_gradients_of_every_kind() -> None:
    grads: Any = {
        "whole": torch.tensor([1.0, 2.0]),
        "half": torch.tensor([2.0], dtype=torch.float16),
        "complex": torch.tensor([3 + 4j]).conj(),
        "none": None,
        "empty": torch.empty(0, 3),
        "double": torch.tensor(1.0, dtype=torch.float64),
    }
    whole = torch.tensor(1.0 + 4 + 4 + 9 + 16 + 1, dtype=torch.float64)
    assert_same(fpipe.global_norm(grads), whole.sqrt(), 1e-6)
    clipped, norm = fpipe.clip_by_global_norm(grads, 1e-3)
    assert {k: v if v is None else v.dtype for k, v in clipped.items()} == {
        k: v if v is None else v.dtype for k, v in grads.items()
    }
    torch.testing.assert_close(fpipe.global_norm(clipped).item(), 1e-3, rtol=1e-3, atol=0)
    assert norm > 5 and grads["whole"].tolist() == [1, 2]


def test_no_gradient_at_all() -> None:
    assert fpipe.global_norm([None, {}]) == 0
    assert fpipe.clip_by_global_norm([None, {}], 1.0).grads == [None, {}]
    zero = fpipe.clip_by_global_norm([torch.zeros(2)], 1.0)
    assert zero.grads[0].tolist() == [0, 0]


def test_squares_beyond_half_precision() -> None:
    grads = [torch.full((4,), 6e4, dtype=torch.float16)]
    assert fpipe.global_norm(grads) == 2 * grads[0][0].float()


@pytest.mark.parametrize("leaf", [1.0, torch.ones(2, dtype=torch.int64)])
def test_what_is_no_gradient(leaf: Any) -> None:
    with pytest.raises(FpipeError, match=r"grads\[0\]\['w'\]=.* is not a floating-point tensor"):
        fpipe.global_norm([{"w": leaf}])


@pytest.mark.parametrize("bound", [-1.0, float("nan"), "1", None, torch.ones(2)])
def test_bound_must_not_be_negative(bound: Any) -> None:
    with pytest.raises(FpipeError, match=r"max_norm=.* must be a positive number"):
        fpipe.clip_by_global_norm([torch.ones(2)], bound)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("bound", [0.0, 0, 1e-7, 1.0, 5.0, 1e9, INF])
@pytest.mark.parametrize("numbers", [[3.0, 4.0], [0.0, 0.0], [1e-7, 0], [INF, 1.0], [NAN, 1.0]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_rule_is_that_of_torch(bound: float, numbers: list[float], dtype: torch.dtype) -> None:
    """A bound of 0 was refused, and an infinite norm made NaN of finite gradients."""
    leaves = [torch.tensor(numbers, dtype=dtype), torch.ones(3, dtype=dtype)]
    parameters = [torch.nn.Parameter(torch.zeros_like(leaf)) for leaf in leaves]
    for parameter, leaf in zip(parameters, leaves, strict=True):
        parameter.grad = leaf.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, bound)
    found = fpipe.clip_by_global_norm(leaves, bound)
    expected = [parameter.grad for parameter in parameters]
    torch.testing.assert_close(found, fpipe.Clipped(expected, norm), equal_nan=True)


def norm_of_two_dtypes(group: Group) -> torch.Tensor:
    """Of gradients of which rank 0 has none, or some in float32, and rank 1 some in float64."""
    pipe = fpipe.pipeline(
        [lambda p, x: x, lambda p, x: x],
        lambda y, _: y.mean(),
        schedules.gpipe(ranks=2, microbatches=1),
        compile=False,
        group=group,
    )
    assert group is not None
    few = None if group.rank() == 0 else torch.full((3,), 1 / 3, dtype=torch.float64)
    more = [few, torch.ones(2)] if group.rank() == 0 else few
    return torch.stack([fpipe.global_norm(own, pipe=pipe) for own in (few, more)])


def test_all_ranks_have_one_norm(crew: Crew) -> None:
    """One that only some ranks had rounded decided otherwise there whether to skip a step."""
    here, there = values(crew.run(norm_of_two_dtypes, ranks=range(2)))
    assert here.dtype == torch.float64
    assert_identical(here, there)
