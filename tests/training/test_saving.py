"""Checkpoints of training: what was saved is found again, whole, and training goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

import fpipe
from fpipe import BatchError, FpipeError, PipelineError, schedules
from fpipe.checkpoint import checkpoint_writer
from tests import state_model
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
        patch.setattr(checkpoint_writer, "_put_in_place", killed)
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
    with pytest.raises(FpipeError, match="3 pytrees, one per stage"):
        wider.load(tmp_path / "last")


def test_files_of_others_are_told(tmp_path: Path) -> None:
    model, trainer = make()
    state = trainer.init(model.params)
    last, data = tmp_path / "last", tmp_path / "last" / "__0_0.distcp"
    trainer.save(last, model.params, state)
    _, descent = make(optimizer=torch.optim.SGD)
    with pytest.raises(BatchError, match=r"another optimizer: its state of '0\.b' has 'exp_avg'"):
        descent.load(last)
    frozen = fpipe.train(trainer.pipe, torch.optim.AdamW, groups={"0.*": None})
    assert frozen.load(last).state.moments[0] == {"b": None, "w": None}
    frozen.save(last, model.params, frozen.init(model.params))
    with pytest.raises(BatchError, match=r"no state of the parameter '0\.b', which was not"):
        trainer.load(last)
    # Of a second checkpoint of the same shapes, whose numbers would be read without a word.
    trainer.save(last, model.params, state)
    trainer.save(tmp_path / "other", model.params, state)
    shutil.copy(tmp_path / "other" / "__0_0.distcp", data)
    for read in (trainer.load, trainer.pipe.load):
        with pytest.raises(BatchError, match=r"__0_0\.distcp belongs to another checkpoint"):
            read(last, **({} if read == trainer.load else PARAMETERS | {"shapes": model.params}))
    trainer.save(last, model.params, state)
    shutil.copy(tmp_path / "other" / "training.pt", last)
    with pytest.raises(BatchError, match=r"training\.pt belongs to another checkpoint"):
        trainer.load(last)
    trainer.save(last, model.params, state)
    data.write_bytes(data.read_bytes()[:-900])
    with pytest.raises(BatchError, match="cannot be read"):
        trainer.load(last)
    data.unlink()
    with pytest.raises(BatchError, match="cannot be read: FileNotFoundError"):
        trainer.load(last)
    (last / ".metadata").write_bytes(b"half")
    with pytest.raises(BatchError, match=r"\.metadata cannot be read"):
        trainer.load(last)
    (last / "training.pt").unlink()
    (last / ".metadata").unlink()
    with pytest.raises(BatchError, match="holds neither"):
        trainer.load(last)


PARAMETERS: Any = {"rename": lambda name: f"params.{name}", "strict": False}


def test_nothing_but_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    model, trainer = make()
    (tmp_path / "mine.txt").write_text("a year of work")
    for save in (
        lambda: trainer.pipe.save(tmp_path, model.params),
        lambda: trainer.save(tmp_path, model.params, trainer.init(model.params)),
    ):
        with pytest.raises(PipelineError, match="something else than a checkpoint is there"):
            save()
    assert (tmp_path / "mine.txt").read_text() == "a year of work"


def test_parameters_alone_are_saved(tmp_path: Path) -> None:
    model, trainer = make()
    pipe = trainer.pipe
    for factor in (1, 2):  # the second takes the place of the first
        params = fpipe.pytree.tree_map(lambda leaf, f=factor: leaf * f, model.params)
        pipe.save(tmp_path / "last", params)
        assert_identical(pipe.load(tmp_path / "last", shapes=model.params), params)
    assert [place.name for place in tmp_path.iterdir()] == ["last"]
    with pytest.raises(BatchError, match=r"of parameters alone .* pipe\.load reads"):
        trainer.load(tmp_path / "last")
    with pytest.raises(BatchError, match=r"'0\.b' lies on the meta device and has no data to save"):
        pipe.save(tmp_path / "last", fpipe.pytree.tree_map(lambda p: p.to("meta"), params))


def stateful(optimizer: Any = torch.optim.AdamW) -> fpipe.Trainer:
    pipe = fpipe.pipeline(
        state_model.without_aux,
        schedule=schedules.one_f_one_b(ranks=4, microbatches=2),
        has_state=True,
        compile=False,
    )
    return fpipe.train(pipe, optimizer, lr=0.1)


def test_running_statistics_are_saved(tmp_path: Path) -> None:
    trainer, batch = stateful(), state_model.make_batch()
    params, model_state = state_model.make_params(), state_model.make_state()
    state = trainer.init(params)
    with pytest.raises(FpipeError, match="model_state is missing"):
        trainer.save(tmp_path / "last", params, state)
    _, params, state, _, model_state = trainer.step(params, state, model_state, batch)
    trainer.save(tmp_path / "last", params, state, model_state=model_state, step=1)
    saved = stateful().load(tmp_path / "last")
    assert saved._fields == ("params", "state", "step", "extra", "model_state")
    assert_identical((saved.params, saved.state, saved.model_state), (params, state, model_state))
    like = stateful().load(tmp_path / "last", like=params, like_state=model_state)
    assert_identical(like.model_state, model_state)
    assert type(saved.model_state["first"]) is fpipe.nn.BatchStats
    on = [
        stepper.step(*values, batch)
        for stepper, values in (
            (stateful(), (saved.params, saved.state, saved.model_state)),
            (trainer, (params, state, model_state)),
        )
    ]
    assert_identical(*on)
    _, stateless = make()
    with pytest.raises(FpipeError, match="model_state is given, and the pipeline has none"):
        stateless.save(tmp_path / "no", *trained_once(stateless), model_state={})


def trained_once(trainer: Any) -> Any:
    model = mlp(2, 8)
    return trained(trainer, model.params, trainer.init(model.params), model.batch, 1)


def test_the_statistics_of_a_module_are_saved_by_its_names(tmp_path: Path) -> None:
    def make_one() -> Any:
        torch.manual_seed(0)
        module = torch.nn.Sequential(
            torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)
        ).double()
        pipe = fpipe.from_module(
            module,
            loss=lambda y, batch: y.square().mean(),
            schedule=schedules.one_f_one_b(ranks=2, microbatches=2),
            cuts=["1"],
            has_state=True,
            compile=False,
        )
        return module, fpipe.train(pipe, torch.optim.AdamW)

    module, trainer = make_one()
    params: Any = {name: value.detach() for name, value in module.named_parameters()}
    state, model_state = trainer.init(params), trainer.pipe.init_state()
    batch = {"input": torch.randn(4, 3, dtype=torch.float64)}
    _, params, state, _, model_state = trainer.step(params, state, model_state, batch)
    trainer.save(tmp_path / "last", params, state, model_state=model_state)
    saved = make_one()[1].load(tmp_path / "last")
    assert_identical((saved.params, saved.state, saved.model_state), (params, state, model_state))


def test_steps_go_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, trainer = make()
    params, state = trained_once(trainer)
    go_on, put_in_place = Event(), checkpoint_writer._put_in_place

    def late(partial: Path, target: Path) -> None:
        assert go_on.wait(30)
        put_in_place(partial, target)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "_put_in_place", late)
        pending = trainer.save_async(tmp_path / "one", params, state, step=1)
        later = trained(trainer, params, state, model.batch)
        assert not pending.done() and "pending save" in repr(pending)
        with pytest.raises(TimeoutError, match=r"one is not whole after 0\.01 s"):
            pending.wait(0.01)
        assert not (tmp_path / "one").exists()
        go_on.set()
        # The next one waits for the last.
        trainer.save(tmp_path / "three", *later, step=3)
        assert pending.done() and (tmp_path / "one").exists()
        pending.wait()
    assert_identical(trainer.load(tmp_path / "one")[:3], (params, state, 1))
    assert_identical(trainer.load(tmp_path / "three")[:3], (*later, 3))


def test_what_fails_in_the_thread_is_raised_once(tmp_path: Path) -> None:
    _, trainer = make()
    now = trained_once(trainer)
    (tmp_path / "a file").touch()
    pending = trainer.save_async(tmp_path / "a file" / "last", *now)
    with pytest.raises(PipelineError, match="last was not written: NotADirectoryError"):
        pending.wait()
    pending.wait()
    trainer.save_async(tmp_path / "a file" / "last", *now)
    with pytest.raises(PipelineError, match="last was not written: NotADirectoryError"):
        trainer.save(tmp_path / "next", *now)
    trainer.save(tmp_path / "next", *now)
    assert sorted(place.name for place in tmp_path.iterdir()) == ["a file", "next"]


def test_an_ensemble_is_saved(tmp_path: Path) -> None:
    model, trainer = make()
    members = fpipe.vmap(trainer, in_dims=(0, None))
    stacked = fpipe.pytree.tree_map(lambda leaf: torch.stack([leaf, 2 * leaf]), model.params)
    params, state = trained(members, stacked, members.init(stacked), model.batch)
    members.save(tmp_path / "last", params, state)
    saved = members.load(tmp_path / "last")
    assert_identical((saved.params, saved.state), (params, state))
