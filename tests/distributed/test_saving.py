"""Checkpoints over processes: saved while steps run, by replicas, and by a run that is killed."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fpipe
from fpipe import Schedule, pytree, schedules
from tests.distributed import actors
from tests.distributed.actors import Group
from tests.distributed.crew import Crew, attempt, mesh_of, values
from tests.models import Model, assert_identical, assert_same, mlp, unpipelined

SCHEDULE = schedules.zbv(ranks=2, microbatches=4)


def by_stage(parts: Any, schedule: Schedule = SCHEDULE) -> list[Any]:
    """Each stage's own, from the rank that has it."""
    return [parts[rank][stage] for stage, rank in enumerate(schedule.placement)]


def trainer_of(group: Group, schedule: Schedule) -> tuple[Model, fpipe.Trainer]:
    model, pipe = actors.recorded(group, "mlp", schedule, 8)
    return model, fpipe.train(pipe, torch.optim.AdamW, lr=0.1)


def saved_meanwhile(group: Group, path: str) -> list[Any]:
    """Each step is saved while the next one runs; the second of them cannot be, on one rank."""
    model, trainer = trainer_of(group, SCHEDULE)
    params = trainer.pipe.local(model.params)
    state, steps, failures = trainer.init(params), [], []
    for step in range(4):
        keep = 0 if step == 1 and trainer.pipe.rank == 1 else 2
        started = attempt(
            lambda k=keep, s=step, p=params, m=state: steps.append(
                trainer.save_async(f"{path}/step-{s}", p, m, step=s, keep=k)
            )
        )
        failures.append(started.failure and started.error.text)
        _, params, state, _ = trainer.step(params, state, model.batch)
    for pending in steps:
        pending.wait()
    read = trainer.load(f"{path}/step-3")
    _, after, *_ = trainer.step(read.params, read.state, model.batch)
    return [failures, after, params, read.step]


def test_steps_run_while_a_checkpoint_is_written(crew: Crew, tmp_path: Path) -> None:
    parts = values(crew.run(saved_meanwhile, str(tmp_path), ranks=range(2)))
    for failures, after, params, step in parts:
        assert [bool(text) for text in failures] == [False, True, False, False]
        assert "keep=0 must be a number" in failures[1]
        assert_identical(after, params)
        assert step == 3
    assert sorted(place.name for place in tmp_path.iterdir()) == ["step-2", "step-3"]


def unwritable(group: Group, path: str) -> list[Any]:
    """A thread that cannot write: both ranks hear of it, and go on."""
    model, trainer = trainer_of(group, SCHEDULE)
    params = trainer.pipe.local(model.params)
    pending = trainer.save_async(f"{path}/file/last", params, trainer.init(params))
    loss = trainer.step(params, trainer.init(params), model.batch).loss
    return [attempt(pending.wait), loss]


def test_what_one_cannot_write_all_are_told(crew: Crew, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for failed, _ in values(crew.run(unwritable, str(tmp_path), ranks=range(2))):
        assert "was not written: rank 0: NotADirectoryError" in failed.error.text
        assert failed.error.kind == "PipelineError" and failed.error.rank == 0


def parameters(group: Group, path: str) -> Any:
    model, trainer = trainer_of(group, SCHEDULE)
    trainer.pipe.save(path, trainer.pipe.local(model.params))


def test_parameters_alone_are_read_in_one_process(crew: Crew, tmp_path: Path) -> None:
    values(crew.run(parameters, str(tmp_path / "last"), ranks=range(2)))
    model, trainer = trainer_of(None, SCHEDULE)
    read = trainer.pipe.load(tmp_path / "last", shapes=model.params)
    assert_identical(read, model.params)


def replicas(group: Group, path: str, shard: bool) -> list[Any]:
    """Two replicas of two ranks save once, and each reads its part again."""
    mesh = mesh_of((2, 2), ("dp", "pp"))
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    model = actors.model_of("mlp", schedule.num_stages, 8)
    pipe = actors.pipeline(None, model, schedule, mesh=mesh, data="dp")
    trainer = fpipe.train(pipe, torch.optim.AdamW, lr=0.1)
    params = (pipe.shard if shard else pipe.replicate)(pipe.local(model.params))
    _, params, state, _ = trainer.step(params, trainer.init(params), model.batch)
    pending = trainer.save_async(path, params, state, step=1)
    pipe.save(f"{path}-params", params)
    pending.wait()
    read = trainer.load(path, like=params)
    again = trainer.step(read.params, read.state, model.batch)
    return [again.loss, trainer.step(params, state, model.batch).loss]


@pytest.mark.parametrize("shard", [False, True])
def test_replicas_save_together(crew: Crew, tmp_path: Path, shard: bool) -> None:
    path = tmp_path / "last"
    losses = values(crew.run(replicas, str(path), shard))
    for again, on in losses:
        assert_identical(again, on)
    model, trainer = trainer_of(None, schedules.one_f_one_b(ranks=2, microbatches=2))
    read = trainer.load(path)
    whole = trainer.pipe.load(tmp_path / "last-params", shapes=model.params)
    assert_identical(read.params, whole)
    _, params, _, _ = trainer.step(model.params, trainer.init(model.params), twice(model.batch))
    assert_same(whole, params, 1e-9)


def twice(batch: Any) -> Any:
    """The rows of two replicas that were given the same."""
    return pytree.tree_map(lambda rows: torch.cat([rows, rows]), batch)


STEPS = 400


def trained_for_long(group: Group, path: str) -> None:
    """Save after each step, now at once, now behind; the test ends it."""
    model, trainer = trainer_of(group, SCHEDULE)
    params = trainer.pipe.local(model.params)
    state = trainer.init(params)
    for step in range(1, STEPS + 1):
        _, params, state, _ = trainer.step(params, state, model.batch)
        save = trainer.save_async if step % 2 else trainer.save
        save(f"{path}/last", params, state, step=step)


def trained_by_torch(model: Model, steps: int) -> Any:
    """Parameters after some steps of torch's own loop."""
    leaves, spec = pytree.flatten(model.params)
    leaves = [leaf.clone() for leaf in leaves]
    optimizer = torch.optim.AdamW(leaves, lr=0.1, foreach=False)
    for _ in range(steps):
        params = pytree.unflatten(spec, leaves)
        _, grads = unpipelined(model.stages, model.loss, params, model.batch)
        for leaf, grad in zip(leaves, pytree.flatten(grads)[0], strict=True):
            leaf.grad = grad
        optimizer.step()
    return pytree.unflatten(spec, leaves)


def gone_on(group: Group, schedule: Schedule, path: str) -> list[Any]:
    """What was saved last, and two steps more."""
    model, trainer = trainer_of(group, schedule)
    params, state, step, _ = trainer.load(path)
    read = params
    for _ in range(2):
        _, params, state, _ = trainer.step(params, state, model.batch)
    trainer.save(path, params, state, step=step + 2)
    return [read, params, step]


def test_a_run_that_is_killed_goes_on_over_other_ranks(crew: Crew, tmp_path: Path) -> None:
    with Crew(2) as killed:
        killed.start(trained_for_long, str(tmp_path))
        deadline = time.monotonic() + 60
        while not (tmp_path / "last").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(random.Random(0).random() / 2)
        for rank in range(2):
            killed.signal(rank, signal.SIGKILL)
    path = str(tmp_path / "last")
    other = schedules.one_f_one_b(ranks=4, microbatches=4)
    parts = values(crew.run(gone_on, other, path))
    step = parts[0][2]
    assert 1 <= step < STEPS
    model = mlp(SCHEDULE.num_stages, 8)
    assert_same(by_stage([part[0] for part in parts], other), trained_by_torch(model, step), 1e-9)
    assert_same(
        by_stage([part[1] for part in parts], other), trained_by_torch(model, step + 2), 1e-9
    )
    assert trainer_of(None, SCHEDULE)[1].load(path).step == step + 2
    assert [place.name for place in tmp_path.iterdir()] == ["last"]
