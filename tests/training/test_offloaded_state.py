"""States of optimizers, and parameters, in files that are mapped into memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

import fpipe
from fpipe import FpipeError, StageError, pytree, schedules
from tests import warm
from tests.distributed.crew import server
from tests.models import assert_identical, mlp, pipe_of
from tests.training import resident

ROOT: Final = Path(__file__).parents[2]
ONE_F_ONE_B: Final = schedules.one_f_one_b(ranks=2, microbatches=4)


def copies(tree: Any) -> Any:
    return pytree.tree_map(torch.clone, tree)


def end_of(trainer: fpipe.Trainer, params: Any, batch: Any) -> Any:
    state = trainer.init(params)
    for _ in range(3):
        loss, params, state, norm = trainer.step(params, state, batch)
    return loss, params, state, norm


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adafactor])
@pytest.mark.parametrize("more", [{}, {"max_norm": 0.05}, {"ema": 0.9}, {"donate": True}])
def test_a_state_elsewhere_has_the_same_bits(
    tmp_path: Path, more: dict[str, Any], optimizer: Any
) -> None:
    model = mlp(2, 8)
    pipe = pipe_of(model, ONE_F_ONE_B)
    ends = [
        end_of(
            fpipe.train(pipe, optimizer, lr=0.1, offload=offload, **more),
            copies(model.params),
            model.batch,
        )
        for offload in (None, "cpu", tmp_path)
    ]
    assert_identical(ends[1], ends[0])
    assert_identical(ends[2], ends[0])


def test_a_state_in_files_is_read_again(tmp_path: Path) -> None:
    model = mlp(2, 8)
    trainer = fpipe.train(
        pipe_of(model, ONE_F_ONE_B), torch.optim.AdamW, lr=0.1, offload=tmp_path / "state", ema=0.9
    )
    _, params, state, _ = trainer.step(model.params, trainer.init(model.params), model.batch)
    trainer.save(tmp_path / "saved", params, state)
    again = trainer.load(tmp_path / "saved")
    assert_identical((again.params, again.state), (params, state))
    assert_identical(
        trainer.step(again.params, again.state, model.batch),
        trainer.step(params, state, model.batch),
    )


def test_members_of_an_ensemble_have_their_state_in_files(tmp_path: Path) -> None:
    model = mlp(2, 8)
    ends = []
    for offload in (None, tmp_path):
        alone = fpipe.train(pipe_of(model, ONE_F_ONE_B), torch.optim.AdamW, lr=0.1, offload=offload)
        stacked = pytree.tree_map(lambda leaf: torch.stack([leaf, 2 * leaf]), model.params)
        ends.append(end_of(fpipe.vmap(alone, in_dims=(0, None)), stacked, model.batch))
    assert_identical(*ends)


def test_a_directory_that_cannot_be_one(tmp_path: Path) -> None:
    pipe = pipe_of(mlp(2, 8), ONE_F_ONE_B)
    (tmp_path / "file").write_text("")
    with pytest.raises(FpipeError, match="file cannot be a directory of tensors: File exists"):
        fpipe.train(pipe, torch.optim.SGD, lr=0.1, offload=tmp_path / "file")
    with pytest.raises(FpipeError, match='offload=3 is an int: it must be "cpu", a path'):
        fpipe.train(pipe, torch.optim.SGD, lr=0.1, offload=3)  # type: ignore[arg-type]
    pair = (lambda params: (), lambda grads, state, params: (grads, state))
    with pytest.raises(FpipeError, match=r"^offload: an optimizer that is a pair of functions"):
        fpipe.train(pipe, pair, offload="cpu")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    model = mlp(2, 8)
    trainer = fpipe.train(pipe_of(model, ONE_F_ONE_B), torch.optim.Adam, lr=0.1, offload=tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FpipeError, match=r"cannot hold a tensor of [0-9,]+ bytes: No space left"):
        trainer.init(model.params)
    assert not list(tmp_path.iterdir())


def ones(key: Tensor, name: str, like: Tensor) -> Tensor:
    return torch.ones(like.shape, dtype=like.dtype)


def test_parameters_in_files(tmp_path: Path) -> None:
    model = mlp(2, 8)
    pipe, key = pipe_of(model, ONE_F_ONE_B), fpipe.random.key(0)
    in_memory = pipe.init(ones, key, shapes=model.params)
    params = pipe.init(ones, key, shapes=model.params, storage=tmp_path / "params")
    assert not list((tmp_path / "params").iterdir())
    assert_identical(params, in_memory)
    assert_identical(pipe.step(params, model.batch), pipe.step(in_memory, model.batch))
    pipe.save(tmp_path / "saved", model.params)
    read = pipe.load(tmp_path / "saved", shapes=model.params, storage=tmp_path / "params")
    assert_identical(read, model.params)


def test_a_policy_changes_nothing_on_the_cpu() -> None:
    model = mlp(2, 8)
    pipe = pipe_of(model, ONE_F_ONE_B, devices=["cpu"] * 2, offload_policy=CPUOffloadPolicy())
    plain = pipe_of(model, ONE_F_ONE_B)
    assert_identical(pipe.step(model.params, model.batch), plain.step(model.params, model.batch))
    assert str(pipe.programs(model.params, model.batch)) == str(
        plain.programs(model.params, model.batch)
    )


def test_a_policy_that_cannot_be_kept() -> None:
    model = mlp(2, 8)
    with pytest.raises(StageError, match="nothing says where stages compute: in one process pass"):
        pipe_of(model, ONE_F_ONE_B, offload_policy=CPUOffloadPolicy())
    with pytest.raises(StageError, match="offload_policy='cpu' is a str: it must be a CPUOffload"):
        pipe_of(model, ONE_F_ONE_B, offload_policy="cpu")
    assert isinstance(pipe_of(model, ONE_F_ONE_B, offload_policy=OffloadPolicy()), fpipe.Pipeline)


@pytest.mark.processes
def test_anonymous_memory_is_lower_by_what_lies_in_files(tmp_path: Path) -> None:
    found = {}
    for kind in ("memory", "params", "states"):
        done = warm.run("tests.training.resident", kind, folder=ROOT, scratch=tmp_path, timeout=100)
        assert done.code == 0, done.output
        found[kind], params, states = map(int, done.output.split())
    assert (params, states) == (32, 64)
    assert found["params"] <= found["memory"] - 0.9 * params, found
    assert found["states"] <= found["memory"] - 0.9 * states, found


@pytest.mark.processes
def test_nothing_is_left_of_a_process_that_is_killed(tmp_path: Path) -> None:
    here, there = server().Pipe()
    process = server().Process(target=resident.stay, args=(str(tmp_path), there), daemon=True)
    process.start()
    there.close()
    _, params, states = here.recv()
    assert (params, states) == (32, 64)
    process.kill()
    process.join(10)
    assert not process.is_alive()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
