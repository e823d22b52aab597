"""Replicas: the step of all of them is the step of one process on all rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fpipe
from fpipe import Schedule, pytree, schedules
from tests.distributed import replicas
from tests.distributed.crew import Crew, values
from tests.models import assert_same

SOON = 15.0

EVERY: list[Any] = [("step", 1), (1, 2), (2, "step"), (1, 1)]
SOME: list[Any] = [None, (1, 2), (2, "step")]
ONE: list[Any] = [(1, 2)]
"""When parameters are gathered and gradients reduced; what is traced is the same under each."""
UNEQUAL = [[8, 8], [5, 11], [14, 2], [16, 0]]
"""Rows of two replicas of four microbatches: a replica may have fewer, or none."""

FAMILIES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "one_f_one_b": {},
    "eager_1f1b": {},
    "interleaved_1f1b": {"stages_per_rank": 2},
    "looped_bfs": {"stages_per_rank": 2},
    "interleaved_zero_bubble": {"stages_per_rank": 2},
    "zb_h1": {},
    "zb_h2": {},
    "zbv": {},
    "v_half": {},
    "v_min": {},
    "dualpipev": {},
}


def schedule_of(family: str, ranks: int = 2, microbatches: int = 4) -> Schedule:
    options: Any = FAMILIES[family]
    return schedules.get(family, ranks=ranks, microbatches=microbatches, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_step_of_one_process(crew: Crew, family: str) -> None:
    # More of them where stages go to and fro, and a few where they lie in one line and in loops.
    policies = {"zbv": EVERY, "one_f_one_b": SOME, "interleaved_1f1b": SOME}.get(family, ONE)
    done = values(
        crew.run(replicas.steps, schedule_of(family), (2, 2), ("dp", "pp"), ["dp"], policies)
    )
    assert done == [2 * len(policies)] * 4


@pytest.mark.parametrize(
    ("reduction", "sizes"),
    [
        *(("mean", sizes) for sizes in UNEQUAL),
        *((reduction, sizes) for reduction in ("sum", "weighted") for sizes in UNEQUAL[2:]),
    ],
)
def test_losses_of_replicas_add_up_to_that_of_all_rows(
    crew: Crew, reduction: str, sizes: list[int]
) -> None:
    arguments: Any = (schedule_of("one_f_one_b"), (2, 2), ("dp", "pp"), ["dp"], ONE)
    values(crew.run(replicas.steps, *arguments, reduction, sizes))


@pytest.mark.parametrize("family", ["zbv", "interleaved_1f1b", "zb_h2"])
def test_a_replica_without_rows_joins_every_collective(crew: Crew, family: str) -> None:
    arguments: Any = (schedule_of(family), (2, 2), ("dp", "pp"), ["dp"], [None, (1, 1), (2, 2)])
    sizes = [15, 1] if family == "zb_h2" else [0, 16]
    values(crew.run(replicas.steps, *arguments, "mean", sizes))


@pytest.mark.parametrize(
    ("shape", "names", "dims"),
    [
        ((2, 1), ("dp", "pp"), ["dp"]),
        ((1, 2), ("dp", "pp"), ["dp"]),
        ((2, 2), ("pp", "dp"), ["dp"]),
        ((4, 1), ("dp", "pp"), ["dp"]),
        ((2, 2, 1), ("replicate", "shard", "pp"), ["replicate", "shard"]),
        ((2, 1, 2), ("replicate", "shard", "pp"), ["replicate", "shard"]),
    ],
)
def test_meshes_of_every_form(crew: Crew, shape: Any, names: Any, dims: Any) -> None:
    schedule = schedule_of("interleaved_1f1b", ranks=shape[names.index("pp")])
    arguments: Any = (replicas.steps, schedule, shape, names, dims, ONE)
    if math.prod(shape) == 4:
        values(crew.run(*arguments))
    else:
        with Crew(2) as pair:  # a mesh is of all processes
            values(pair.run(*arguments))


@pytest.mark.parametrize("limit", [1, 100])
def test_collectives_in_buckets(crew: Crew, limit: int) -> None:
    arguments: Any = (schedule_of("zb_h1"), (2, 2), ("dp", "pp"), ["dp"], ONE, "mean", None)
    values(crew.run(replicas.steps, *arguments, {"bucket_bytes": limit}))


@pytest.mark.parametrize(
    ("reduction", "sizes", "policies"),
    [("mean", [8, 8], SOME), ("weighted", [12, 4], ONE), ("weighted", [0, 16], ONE)],
)
def test_a_module_with_tied_frozen_and_scalar_parameters(
    crew: Crew, reduction: str, sizes: list[int], policies: list[Any]
) -> None:
    arguments: Any = (schedule_of("interleaved_1f1b"), policies, reduction, sizes)
    values(crew.run(replicas.module_steps, *arguments))


def test_replicas_draw_different_numbers_and_ranks_the_same(crew: Crew) -> None:
    found = values(crew.run(replicas.key_masks))
    outputs = {replica: again for replica, first, again in found if first is not None}
    for _, first, again in found:
        assert (first is None) == (again is None)
        assert first is None or torch.equal(first, again)
    assert len(outputs) == 2
    assert not torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("kind", ["mean", "first"])
def test_replicas_agree_on_a_state(crew: Crew, kind: str) -> None:
    rows = replicas.data()
    seen = rows if kind == "mean" else rows[:8]
    for state in values(crew.run(replicas.states, kind, [8, 8], 1)):
        torch.testing.assert_close(state["mean"], 0.5 * seen.mean(0))
        assert state["count"] == 1


@pytest.mark.parametrize("kind", ["mean", "first"])
def test_a_replica_without_rows_leaves_the_state_as_it_was(crew: Crew, kind: str) -> None:
    share = 0.5 if kind == "mean" else 1.0
    for state in values(crew.run(replicas.states, kind, [16, 0], 1)):
        torch.testing.assert_close(state["mean"], share * 0.5 * replicas.data().mean(0))
        assert state["count"] == 1


def test_an_optimizer_over_replicas(crew: Crew) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=4)
    pipe = fpipe.pipeline([replicas.stage] * 4, replicas.mean_square, schedule, compile=False)
    whole = replicas.train(pipe, replicas.parameters(4), replicas.data(), 0.05)
    cases = [False, True]
    by_rank = values(crew.run(replicas.trained, cases, 0.05))
    for divided, *parts in zip(cases, *by_rank, strict=True):
        held = 0
        for loss, norm, params, moments in parts:
            assert_same([loss, norm], whole[:2], 1e-9)
            for own, expected in zip(params, whole[2], strict=True):
                assert own is None or pytree.structure(own) == pytree.structure(expected)
                if own is not None:
                    assert_same(own, expected, 1e-8)
            held += moments
        # Each element of a moment is held once, or once on each replica; 0-dimensional ones apart.
        assert held == whole[3] * (1 if divided else 2)


def test_replicas_of_a_pipeline_whose_layers_are_divided() -> None:
    with Crew(8) as crew:
        seen = values(crew.run(replicas.three_dimensional, [None, (1, 1)], timeout=120.0))
    assert min(seen) == 8  # four on each rank, under each policy


@pytest.mark.parametrize(
    ("process", "deed", "at"), [(3, "boom", 2), (1, "kill", 1), (2, "stop", 1)]
)
def test_a_rank_that_fails_is_named_on_all_replicas(process: int, deed: str, at: int) -> None:
    gone = [process] if deed in ("kill", "stop") else []
    with Crew(4) as crew:
        crew.start(replicas.failing, process, deed, at)
        answers = crew.collect(lost=gone)
    for number, outcome in enumerate(answers):
        if number in gone:
            continue
        good, bad, after = outcome.value
        assert good.failure is None
        assert "make a new process group and a new pipeline" in bad.error.text
        assert bad.seconds < SOON
        if deed == "boom":
            assert "boom 42" in bad.error.text
            assert f"failed on rank {process % 2}" in bad.error.text
        assert after.failure is not None
        assert after.seconds < 1.0


def test_replicas_that_cannot_step_together_are_told_and_go_on(crew: Crew) -> None:
    for numbers, shapes, policy, remat, batch, placed, last in values(crew.run(replicas.refused)):
        assert "has other numbers in params" in numbers.error.text
        assert "pipe.replicate(params)" in numbers.error.text
        assert "parameters of other shapes" in shapes.error.text
        assert "has another schedule than others" in policy.error.text
        assert "has another remat policy than others" in remat.error.text
        assert "batch" in batch.error.text
        assert "parameters that lie otherwise" in placed.error.text
        assert last.failure is None


def test_what_is_no_use_of_replicas_is_refused(crew: Crew) -> None:
    for outcomes in values(crew.run(replicas.misused)):
        texts = [outcome.error.text for outcome in outcomes]
        for text, rule in zip(
            texts,
            (
                "data='tp' must be one of the mesh's dimensions ('dp',)",
                "data='pp' must be one of the mesh's dimensions ('dp',)",
                "mesh is not given",
                "bucket_bytes=0 must be a number of bytes",
                "replica_state='last'",
                "is a DTensor over ['dp'] already",
                "make it with data=",
                "is not for transforms",
                "data=",
            ),
            strict=True,
        ):
            assert rule in text


def test_the_times_of_collectives_are_measured_and_shown(crew: Crew) -> None:
    for divided, plain, shown in values(crew.run(replicas.profiled)):
        assert min(divided.unshard) > 0
        assert max(plain.unshard) == 0  # nothing to gather
        assert min(*divided.reduce_grad, *plain.reduce_grad) > 0
        assert shown[:2] == ["0UNSHARD", "2UNSHARD"]
        assert shown[-1] == "0REDUCE_GRAD"


def test_two_stages_at_most_wait_for_their_sums(crew: Crew) -> None:
    """A stage whose gradients are being added up holds them whole until then."""
    schedule = schedules.interleaved_1f1b(ranks=2, microbatches=4, stages_per_rank=4)
    for reduce in ("step", 1):
        sharded = schedule.sharded(reduce=reduce)
        assert values(crew.run(replicas.stages_under_reduction, sharded)) == [2] * 4


def test_the_peak_is_planned(crew: Crew) -> None:
    policies: list[Any] = [(1, "step"), ("step", 1)]
    for peaks in values(crew.run(replicas.memory, policies, 512, 16)):
        assert len(peaks) == len(policies)
        for policy, (planned, measured) in zip(policies, peaks, strict=True):
            assert planned == pytest.approx(measured, rel=0.03), policy
