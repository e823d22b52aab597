"""Checkpoints of training: what was saved is found again, whole, and training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fpipe
from fpipe import BatchError, FpipeError, schedules
from fpipe.training import saving
from tests.models import assert_identical, assert_same, mlp

SCHEDULE = schedules.zb_h1(ranks=2, microbatches=4)


def make(schedule: Any = SCHEDULE, optimizer: Any = torch.optim.AdamW) -> Any:
    model = mlp(schedule.num_stages, 8)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, compile=False)
    return model, fpipe.train(pipe, optimizer, lr=0.1)


def trained(trainer: Any, params: Any, state: Any, batch: Any, steps: int = 2) -> Any:
    for _ in range(steps):
        _, params, state, _ = trainer.step(params, state, batch)
    return params, state


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adafactor]
)
def test_training_goes_on_to_the_same_bits(tmp_path: Path, optimizer: Any) -> None:
    model, trainer = make(optimizer=optimizer)
    params, state = trained(trainer, model.params, trainer.init(model.params), model.batch)
    extra = {"rows": [1, 2], "order": torch.tensor([2, 1])}
    trainer.save(tmp_path / "last", params, state, step=2, extra=extra)
    # Under another schedule, and without an init.
    _, other = make(schedules.one_f_one_b(ranks=2, microbatches=4), optimizer)
    saved = other.load(tmp_path / "last")
    assert_identical((saved.params, saved.state), (params, state))
    assert saved.step == 2
    assert saved.extra["rows"] == [1, 2]
    assert torch.equal(saved.extra["order"], extra["order"])  # type: ignore[arg-type]
    on = trained(other, saved.params, saved.state, model.batch)
    assert_same(on, trained(trainer, params, state, model.batch))


def test_a_module_is_saved_by_its_names(tmp_path: Path) -> None:
    def make_one() -> Any:
        module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
        pipe = fpipe.from_module(
            module,
            loss=lambda y, batch: y.square().mean(),
            schedule=schedule,
            cuts=["1"],
            compile=False,
        )
        return module, fpipe.train(pipe, torch.optim.AdamW)

    module, trainer = make_one()
    params: Any = {name: value.detach() for name, value in module.named_parameters()}
    batch = {"input": torch.ones(4, 3)}
    params, state = trained(trainer, params, trainer.init(params), batch)
    trainer.save(tmp_path / "last", params, state)
    _, other = make_one()
    saved = other.load(tmp_path / "last")
    assert_identical((saved.params, saved.state), (params, state))


def test_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    model, trainer = make()
    state = trainer.init(model.params)
    for step in range(4):
        trainer.save(tmp_path / f"step-{step}", model.params, state, step=step, keep=2)
    assert sorted(place.name for place in tmp_path.iterdir()) == ["step-2", "step-3"]


def test_a_crash_leaves_the_last_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, trainer = make()
    state = trainer.init(model.params)
    trainer.save(tmp_path / "last", model.params, state, step=1)

    def killed(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(saving, "_put_in_place", killed)
        with pytest.raises(KeyboardInterrupt):
            trainer.save(tmp_path / "last", model.params, state, step=2)
    assert trainer.load(tmp_path / "last").step == 1
    (tmp_path / "last").rename(tmp_path / "last.old")  # it ended between two renames
    assert trainer.load(tmp_path / "last").step == 1
    trainer.save(tmp_path / "last", model.params, state, step=3)
    assert trainer.load(tmp_path / "last").step == 3


def test_wrong_checkpoints_are_told(tmp_path: Path) -> None:
    model, trainer = make()
    state = trainer.init(model.params)
    with pytest.raises(BatchError, match=r"give a directory that trainer\.save has written"):
        trainer.load(tmp_path / "nowhere")
    with pytest.raises(FpipeError, match="keep=0 must be a number of checkpoints"):
        trainer.save(tmp_path / "last", model.params, state, keep=0)
    with pytest.raises(FpipeError, match="another structure than params"):
        trainer.save(tmp_path / "last", model.params, state._replace(moments=[1]))
    pair = fpipe.train(trainer.pipe, (lambda p: p, lambda g, s, p: (g, s)))
    with pytest.raises(FpipeError, match="its state has no names"):
        pair.save(tmp_path / "last", model.params, pair.init(model.params))
    trainer.save(tmp_path / "last", model.params, state)
    (tmp_path / "last" / "training.pt").write_bytes(b"half")
    with pytest.raises(BatchError, match=r"training\.pt cannot be read"):
        trainer.load(tmp_path / "last")
    _, wider = make(schedules.one_f_one_b(ranks=3, microbatches=4))
    trainer.save(tmp_path / "last", model.params, state)
    with pytest.raises(FpipeError):
        wider.load(tmp_path / "last")
