"""Training steps over processes: the numbers of one process, each rank with its own part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

import fpipe
from fpipe import Schedule, pytree, schedules
from tests.cut_model import make_batch, make_params
from tests.distributed import actors, replicas
from tests.distributed.actors import Group
from tests.distributed.crew import Crew, attempt, mesh_of, values
from tests.models import Model, assert_identical, assert_same

STEPS = 3
CLIPS = ("validate", "wait")
NORMS = (None, 0.05, 1e3)
"""Gradients that are not clipped, those that are, and those that are too small to be."""


def steps_of(
    pipe: fpipe.Pipeline, params: Any, batch: Any, max_norm: float | None, **options: Any
) -> list[fpipe.TrainStep]:
    """A few steps of AdamW."""
    trainer = fpipe.train(pipe, torch.optim.AdamW, lr=0.1, max_norm=max_norm, **options)
    state, steps = trainer.init(params), []
    for _ in range(STEPS):
        steps.append(trainer.step(params, state, batch))
        params, state = steps[-1].params, steps[-1].state
    return steps


def trained(group: Group, schedule: Schedule) -> list[list[Any]]:
    """Loss, norm, parameters and moments after a few steps of stages, for each of `NORMS`."""
    model, pipe = actors.recorded(group, "mlp", schedule, 8)
    return [_trained(pipe, model, max_norm) for max_norm in NORMS]


def _trained(pipe: fpipe.Pipeline, model: Model, max_norm: float | None) -> list[Any]:
    within, waited = (
        steps_of(pipe, pipe.local(model.params), model.batch, max_norm, clip=clip) for clip in CLIPS
    )
    assert_identical(within, waited)
    copies = pipe.local(pytree.tree_map(torch.clone, model.params))
    assert_identical(steps_of(pipe, copies, model.batch, max_norm, donate=True)[-1], within[-1])
    loss, params, state, norm = within[-1]
    return [loss, norm, params, state.moments, int(state.steps)]


@pytest.mark.parametrize("family", ["one_f_one_b", "zb_h1", "zbv"])
def test_ranks_train_to_the_numbers_of_one_process(crew: Crew, family: str) -> None:
    schedule = schedules.get(family, ranks=2, microbatches=4)
    by_rank = values(crew.run(trained, schedule, ranks=range(2)))
    for whole, *parts in zip(trained(None, schedule), *by_rank, strict=True):
        assert_same([part[:2] for part in parts], [whole[:2]] * 2)
        for part in parts:
            for stage, own in enumerate(part[2]):
                if own is not None:
                    assert_same([own, part[3][stage]], [whole[2][stage], whole[3][stage]])
            assert part[4] == STEPS
        assert sum(own is not None for part in parts for own in part[2]) == schedule.num_stages


def shared(group: Group, schedule: Schedule) -> list[list[Any]]:
    """A table that the ends of one function read on two ranks, after steps with each norm."""
    pipe = actors.recorded_function(group, schedule)
    results = []
    for max_norm in NORMS:
        given, batch = make_params(), make_batch()
        within, waited = (steps_of(pipe, given, batch, max_norm, clip=clip) for clip in CLIPS)
        assert_identical(within, waited)
        loss, params, _, norm = within[-1]
        results.append([loss, norm, params["table"]])
    return results


def test_a_shared_parameter_stays_equal_on_its_ranks(crew: Crew) -> None:
    schedule = schedules.interleaved_1f1b(ranks=2, microbatches=4)
    by_rank = values(crew.run(shared, schedule, ranks=range(2)))
    for whole, *parts in zip(shared(None, schedule), *by_rank, strict=True):
        for part in parts:
            assert_same(part[:2], whole[:2])
        assert_identical(parts[0][2], parts[1][2])
        assert_same(parts[0][2], whole[2])


def init_fn(key: Any, name: str, like: torch.Tensor) -> torch.Tensor:
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    return fpipe.random.normal(key, like.shape, like.dtype)


def clipped_parts(group: Group, schedule: Schedule) -> list[list[Any]]:
    """Steps of one function that know a norm, each rank with the leaves that it reads alone."""
    pipe = actors.recorded_function(group, schedule)
    batch = make_batch()
    drawn = pipe.init(init_fn, fpipe.random.key(0), batch, shapes=make_params())
    results = []
    for max_norm in NORMS[1:]:
        trainer = fpipe.train(pipe, torch.optim.AdamW, lr=0.1, max_norm=max_norm)
        loss, params, _, norm = trainer.step(drawn, trainer.init(drawn), batch)
        results.append([loss, norm, pipe.own(params)])
    return results


def test_leaves_that_lie_elsewhere_are_no_trouble(crew: Crew) -> None:
    # The squares of the norm were made where the first leaf lay, on the meta device.
    schedule = schedules.interleaved_1f1b(ranks=2, microbatches=4)
    whole = clipped_parts(None, schedule)
    for parts in values(crew.run(clipped_parts, schedule, ranks=range(2))):
        for (*numbers, own), (*expected, params) in zip(parts, whole, strict=True):
            assert_same(numbers, expected)
            assert_same(own, {name: params[name] for name in own})


def wrong_rate(group: Group, schedule: Schedule, donate: bool) -> list[Any]:
    """A step that one rank refuses, and one after it."""
    model, pipe = actors.recorded(group, "mlp", schedule, 8)
    trainer = fpipe.train(pipe, torch.optim.SGD, lr=0.1, donate=donate)
    params = pipe.local(pytree.tree_map(torch.clone, model.params))
    state = trainer.init(params)
    rate = -1.0 if pipe.rank == 1 else 0.1
    refused = attempt(lambda: trainer.step(params, state, model.batch, lr=rate))
    return [refused, trainer.step(params, state, model.batch).loss]


@pytest.mark.parametrize("donate", [False, True])
def test_what_one_rank_refuses_leaves_nobody_waiting(crew: Crew, donate: bool) -> None:
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    first, second = values(crew.run(wrong_rate, schedule, donate, ranks=range(2)))
    assert first[0].failure is not None
    assert first[0].seconds < 20
    assert "does not take" in second[0].error.text
    assert_same(first[1], second[1])


def saved_and_read(group: Group, schedule: Schedule, path: str, steps: int) -> list[Any]:
    """Train, save at once, and go on from what was read."""
    model, pipe = actors.recorded(group, "mlp", schedule, 8)
    trainer = fpipe.train(pipe, torch.optim.AdamW, lr=0.1)
    params = pipe.local(model.params)
    state = trainer.init(params)
    for _ in range(steps):
        _, params, state, _ = trainer.step(params, state, model.batch)
    trainer.save(path, params, state, step=steps)
    return [params, state.moments]


def read_on(group: Group, schedule: Schedule, path: str) -> list[Any]:
    """What was saved, by other processes, and a step more."""
    model, pipe = actors.recorded(group, "mlp", schedule, 8)
    trainer = fpipe.train(pipe, torch.optim.AdamW, lr=0.1)
    params, state, step, _ = trainer.load(path)
    return [params, state.moments, step, trainer.step(params, state, model.batch).loss]


def by_stage(parts: Sequence[Sequence[Any]], schedule: Schedule) -> list[Any]:
    """Each stage's own, from the rank that has it."""
    return [parts[rank][stage] for stage, rank in enumerate(schedule.placement)]


def test_a_run_goes_on_over_other_ranks(crew: Crew, tmp_path: Path) -> None:
    path, saver = str(tmp_path / "last"), schedules.zbv(ranks=2, microbatches=4)
    parts = values(crew.run(saved_and_read, saver, path, 2, ranks=range(2)))
    params, moments = (by_stage([part[i] for part in parts], saver) for i in range(2))
    for schedule, ranks in (
        (schedules.one_f_one_b(ranks=4, microbatches=4), range(4)),
        (schedules.zbv(ranks=2, microbatches=4), range(2)),
    ):
        read = values(crew.run(read_on, schedule, path, ranks=ranks))
        assert_identical(by_stage([part[0] for part in read], schedule), params)
        assert_identical(by_stage([part[1] for part in read], schedule), moments)
        assert [part[2] for part in read] == [2] * len(ranks)
        losses = [part[3] for part in read]
        assert_same(losses, [read_on(None, schedule, path)[3]] * len(ranks))


def in_files(group: Group, path: str) -> list[Any]:
    """Donated steps of divided parameters: with them and their state in memory, and in files."""
    mesh = mesh_of((2, 2), ("dp", "pp"))
    rows = replicas.rows_of(mesh, ["dp"], replicas.data(), None)
    pipe = fpipe.pipeline(
        [replicas.stage] * 2,
        replicas.mean_square,
        schedules.zb_h1(ranks=2, microbatches=4),
        mesh=mesh,
        data="dp",
        compile=False,
        offload_policy=CPUOffloadPolicy(),
    )
    ends = []
    for folder in (None, path):
        params = pipe.shard(pipe.local(replicas.parameters(2)), storage=folder)
        options: Any = {"max_norm": 0.05, "donate": True, "offload": folder}
        last = steps_of(pipe, params, rows, **options)[-1]
        ends.append((last.loss, last.norm, pipe.own(last.params), last.state.steps))
    assert_identical(*ends)
    return [len(ends[0][2])]


def test_divided_parameters_and_their_state_in_files(crew: Crew, tmp_path: Path) -> None:
    assert values(crew.run(in_files, str(tmp_path))) == [[4]] * 4
    assert list(tmp_path.iterdir()) == []
