"""Over processes, everything is what it is in one process, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import fpipe
from fpipe import Schedule, schedules
from fpipe.schedule.families.evaluation import all_forwards_first
from tests.distributed import actors
from tests.distributed.actors import Output, model_of
from tests.distributed.crew import Crew, values
from tests.laboratory.random_schedules import schedules as any_schedule
from tests.models import assert_identical, assert_same, unpipelined

FAMILIES = list(schedules.FAMILIES)


def merge(parts: Sequence[Any], schedule: Schedule) -> Any:
    """What one process would return, from what each rank returned for the same call."""
    last = schedule.placement[-1]
    if isinstance(parts[0], Output):
        assert all(part.value is None for rank, part in enumerate(parts) if rank != last)
        return parts[last].value
    if isinstance(parts[0], fpipe.Step):
        for rank, part in enumerate(parts):
            own = schedule.stages_of(rank)
            assert not [g for stage, g in enumerate(part.grads) if stage not in own and g]
        grads = [parts[rank].grads[stage] for stage, rank in enumerate(schedule.placement)]
        return fpipe.Step(merge([part.loss for part in parts], schedule), grads)
    for part in parts:
        assert_identical(part, parts[0])
    return parts[0]


def assert_merged(parts: Sequence[Sequence[Any]], expected: Iterable[Any], s: Schedule) -> None:
    """The results of all ranks, call by call, are those of one process."""
    for number, one_process in enumerate(expected):
        whole = one_process.value if isinstance(one_process, Output) else one_process
        assert_identical(merge([results[number] for results in parts], s), whole)


def check_over_ranks(
    crew: Crew,
    actor: Callable[..., list[Any]],
    schedule: Schedule,
    *arguments: Any,
    ranks: Sequence[int] | None = None,
) -> list[Any]:
    """Let `actor` act in this process and over several; both must get the same, which is returned.

    First in this one: the others find what it has compiled in Inductor's cache.
    """
    expected = actor(None, *arguments)
    found = values(crew.run(actor, *arguments, ranks=ranks or range(schedule.num_ranks)))
    assert_merged(found, expected, schedule)
    return expected


def check_one_step(
    crew: Crew,
    name: str,
    schedule: Schedule,
    rows: int,
    dtype: torch.dtype = torch.float64,
    ranks: Sequence[int] | None = None,
    **options: Any,
) -> None:
    """One step over processes, in one process, and without a pipeline."""
    arguments = (name, schedule, rows, dtype, options)
    (step,) = check_over_ranks(crew, actors.one_step, schedule, *arguments, ranks=ranks)
    model = model_of(name, schedule.num_stages, rows, dtype)
    assert_same(step, unpipelined(*model), 1e-10 if dtype == torch.float64 else 2e-5)


# ── schedules and placements ────────────────────────────────────────────────────────────────────


# Families that are neighbours have one placement: in turns they cover what stands below with each.
@pytest.mark.parametrize(
    ("family", "name", "remat"),
    [(f, *[("gpt", "none"), ("conv", "full")][i % 2]) for i, f in enumerate(FAMILIES)],
)
def test_two_ranks(crew: Crew, family: str, name: str, remat: str) -> None:
    check_one_step(crew, name, schedules.get(family, ranks=2, microbatches=3), 6, remat=remat)


@pytest.mark.parametrize(
    ("family", "ranks", "microbatches", "rows", "remat"),
    [
        (f, *[(3, 5, 12), (4, 2, 4)][i % 2], "none" if i % 2 else "full")
        for i, f in enumerate(FAMILIES)
    ],
)
def test_more_ranks(
    crew: Crew, family: str, ranks: int, microbatches: int, rows: int, remat: str
) -> None:
    """Microbatches of two sizes; fewer microbatches than ranks."""
    schedule = schedules.get(family, ranks=ranks, microbatches=microbatches)
    check_one_step(crew, "mlp", schedule, rows, remat=remat)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_weights_made_of_parameters(crew: Crew, remat: str) -> None:
    check_one_step(crew, "adapted", schedules.zbv(ranks=2, microbatches=3), 6, remat=remat)


@pytest.mark.parametrize(
    "placement",
    [
        [0, 1, 1, 0],  # V
        [0, 1, 2, 0, 1, 2],  # looped
        [0, 0, 0, 1],  # uneven, adjacent stages on one rank
        [1, 0, 0, 2, 2, 1],  # adjacent in the middle, ends on one rank
        [2, 1, 0],  # backwards
    ],
    ids=str,
)
@pytest.mark.parametrize("split", [False, True])
def test_placements(crew: Crew, placement: list[int], split: bool) -> None:
    schedule = all_forwards_first(placement, 3, split)
    check_one_step(crew, "conv" if split else "mlp", schedule, 6)


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(schedule=any_schedule())
def test_any_schedule_that_can_run(crew: Crew, schedule: Schedule) -> None:
    """Random placements and orders, B and I with W mixed."""
    check_one_step(crew, "mlp", schedule, 2 * schedule.num_microbatches + 1)


@pytest.mark.parametrize("ranks", [(1, 3), (0, 2, 3), (2,)], ids=str)
def test_a_group_that_is_not_the_world(crew: Crew, ranks: tuple[int, ...]) -> None:
    schedule = schedules.one_f_one_b(ranks=len(ranks), microbatches=4)
    check_one_step(crew, "mlp", schedule, 8, ranks=ranks)


def test_a_mesh_beside_another_dimension(crew: Crew) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=3)
    answers = values(crew.run(actors.on_a_mesh, schedule, "mlp"))
    model = model_of("mlp", 4, 6)
    for replica in (0, 1):
        params = actors.scaled(model.params, 1 + replica)
        expected = actors.pipeline(None, model, schedule).step(params, model.batch)
        parts = [step for number, step in answers if number == replica]
        assert_merged(parts, [expected], schedule)


def test_default_device_is_not_that_of_the_stages(crew: Crew) -> None:
    schedule = schedules.zb_h1(ranks=2, microbatches=3)
    check_over_ranks(crew, actors.with_default_device, schedule, "mlp", schedule, 6)


def test_profilers_show_every_action(crew: Crew) -> None:
    schedule = schedules.zb_h1(ranks=2, microbatches=3)
    for rank, labels in enumerate(values(crew.run(actors.profiled, schedule, ranks=range(2)))):
        assert labels == [f"PP:{action}" for action in schedule.actions[rank]]


def test_one_rank_may_run_uncompiled(crew: Crew) -> None:
    """To be looked at: how much a kernel needs while it runs is no matter of agreement."""
    schedule = schedules.zbv(ranks=2, microbatches=4)
    check_over_ranks(crew, actors.one_uncompiled, schedule, schedule)


@pytest.mark.inductor
def test_compiled(crew: Crew) -> None:
    schedule = schedules.zb_h1(ranks=2, microbatches=2)
    check_one_step(crew, "mlp", schedule, 4, torch.float32, compile=True)


# ── calls ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("placement", [[0, 1, 1, 0], [1, 0, 2]], ids=str)
def test_training_and_evaluation_on_changing_batches(crew: Crew, placement: list[int]) -> None:
    """A new shape is agreed on in passing; an old one is remembered; results stay as they were."""
    schedule = all_forwards_first(placement, 2, True)
    check_over_ranks(crew, actors.every_call, schedule, "mlp", schedule, [4, 2, 5, 4, 2])


@pytest.mark.parametrize("given", [[0, 1], [1, 2, 0]])
def test_ranks_that_read_no_batch_may_pass_none(crew: Crew, given: list[int]) -> None:
    schedule = all_forwards_first([0, 2, 1], 2, False)
    check_over_ranks(crew, actors.step_without_batch, schedule, schedule, 4, given)


def test_two_pipelines_over_one_group(crew: Crew) -> None:
    first = schedules.one_f_one_b(ranks=2, microbatches=3)
    second = schedules.zb_h1(ranks=2, microbatches=2)
    check_over_ranks(crew, actors.two_pipelines, first, first, second)


def test_parameters_of_one_rank_change_their_shapes(crew: Crew) -> None:
    schedule = schedules.one_f_one_b(ranks=3, microbatches=2)
    check_over_ranks(crew, actors.changing_parameters, schedule, schedule)


# ── values on their way ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "placement", [[0, 1, 0, 1, 0], [0, 1, 2, 3, 0], [0, 1, 1, 2, 2], [1, 0, 3, 2, 1, 0]], ids=str
)
def test_views_masks_integers_and_values_that_only_pass(crew: Crew, placement: list[int]) -> None:
    """Buffers are kept from step to step, so whatever still refers to one must be seen."""
    schedule = all_forwards_first(placement, 2, True)
    check_over_ranks(crew, actors.every_call, schedule, "plumbing", schedule, [4, 4, 5, 4, 5, 4])


def test_a_received_value_in_the_graph_of_the_caller_is_not_overwritten(crew: Crew) -> None:
    # Autograd keeps a tensor without any reference that Python could count.
    answers = values(crew.run(actors.hold_outputs, ranks=range(2)))
    assert answers[0] is None
    assert_identical(*answers[1])
