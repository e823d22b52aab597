"""Buffers from files: as the constants of a pipeline, and as the state of its steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fpipe
from fpipe import pytree
from fpipe.nn import BatchStats, buffers_of, state_of
from tests import state_model
from tests.models import assert_identical, assert_same
from tests.modules.helpers import detached, module_pipe, squares
from tests.modules.normed import (
    CUTS,
    WRITERS,
    Normed,
    normed_batch,
    normed_module,
    without_data,
    write_file,
)

Writer = Callable[[nn.Module, Path], Path]
SCHEDULE = fpipe.schedules.zbv(ranks=2, microbatches=4)


def normed_pipe(module: nn.Module, **options: Any) -> fpipe.ModulePipeline:
    """A pipeline of a `Normed`."""
    return module_pipe(module, CUTS, schedule=SCHEDULE, **options)


@pytest.mark.parametrize("write", WRITERS)
def test_module_without_data_is_loaded_with_its_constants(write: Writer, tmp_path: Path) -> None:
    module, shapes, batch = normed_module().eval(), without_data().eval(), normed_batch()
    path = write(module, tmp_path)
    buffers = fpipe.load_buffers(shapes, path)
    assert_identical(buffers, {n: b for n, b in module.state_dict().items() if n in buffers})
    assert buffers.keys() == dict(module.named_buffers()).keys() - {"table", "calls"}
    pipe = normed_pipe(shapes, buffers=buffers)
    params = pipe.load(path)
    assert_identical(params, detached(module))
    expected = normed_pipe(module).step(detached(module), batch)
    assert_identical(tuple(pipe.step(params, batch)), tuple(expected))
    assert_same(expected.loss, squares(module(batch["x"]), batch).detach())


@pytest.mark.parametrize("write", WRITERS)
def test_state_comes_back(write: Writer, tmp_path: Path) -> None:
    module, batch = normed_module(), normed_batch()
    path = write(module, tmp_path)
    pipe = normed_pipe(without_data(), has_state=True, batch_norm="deferred")
    state = pipe.load_state(path)
    assert isinstance(state["norm"], BatchStats)
    assert_identical(buffers_of(state), dict(module.named_buffers()))
    params = pipe.load(path, state, batch)
    got = pipe.step(params, state, batch)
    twin = normed_pipe(module, has_state=True, batch_norm="deferred")
    expected = twin.step(detached(module), state_of(module), batch)
    assert_identical(tuple(got), tuple(expected))
    assert got.state["calls"] == 4
    # There and back: what a step has left is saved, and read again, what is not stored too.
    save_file({**params, **buffers_of(got.state)}, tmp_path / "later.safetensors")
    assert_identical(pipe.load_state(tmp_path / "later.safetensors"), got.state)
    part = pipe.load_state(path, shapes={"scale": state["scale"], "norm": state["norm"]})
    assert_identical(part, {"scale": state["scale"], "norm": state["norm"]})


def test_names_of_a_checkpoint_may_be_others(tmp_path: Path) -> None:
    module = normed_module()
    saved = {f"model.{name}": value for name, value in module.state_dict().items()}
    path = tmp_path / "model.safetensors"
    save_file(saved, path)
    shapes, rename = without_data(), "model.{}".format
    pipe = normed_pipe(shapes, has_state=True)
    assert_identical(buffers_of(pipe.load_state(path, rename=rename)), dict(module.named_buffers()))
    with pytest.raises(fpipe.BatchError, match=r"lacks 'norm.num_batches_tracked', .*rename="):
        pipe.load_state(path)
    with pytest.raises(fpipe.BatchError, match=r"lacks 'scale', .*rename="):
        fpipe.load_buffers(shapes, path)
    buffers = fpipe.load_buffers(shapes, path, rename=rename, device="cpu")
    assert torch.equal(buffers["scale"], module.scale)


def test_rename_need_not_know_what_is_not_read(tmp_path: Path) -> None:
    module = normed_module()
    path = tmp_path / "model.safetensors"
    save_file({f"model.{name}": value for name, value in module.state_dict().items()}, path)
    of_params = {name: f"model.{name}" for name, _ in module.named_parameters()}
    of_buffers = {name: f"model.{name}" for name, _ in module.named_buffers()}
    buffers = fpipe.load_buffers(without_data(), path, rename=of_buffers.__getitem__)
    assert torch.equal(buffers["scale"], module.scale)
    pipe = normed_pipe(without_data(), has_state=True)
    state = pipe.load_state(path, rename=of_buffers.__getitem__)
    assert_identical(buffers_of(state), dict(module.named_buffers()))
    batch = normed_batch()
    params = pipe.load(path, state, batch, rename=of_params.__getitem__, strict=False)
    assert_identical(params, detached(module))
    # What it does not know is not known to be a buffer, and is refused where all must be known.
    with pytest.raises(fpipe.BatchError, match=r"has 'model\.\w.*, which are no parameters"):
        pipe.load(path, state, batch, rename=of_params.__getitem__)
    # It must know what is read: its own error says what it lacks.
    with pytest.raises(KeyError, match="first"):
        pipe.load(path, state, batch, rename=of_buffers.__getitem__, strict=False)


def test_state_to_begin_with_is_that_of_a_new_module() -> None:
    torch.manual_seed(0)
    fresh, pipe = Normed().double(), normed_pipe(without_data(), has_state=True)
    assert_identical(pipe.init_state(), state_of(fresh))
    # A module with numbers begins with them; its own tensors stay the module's.
    module = normed_module()
    state = normed_pipe(module, has_state=True).init_state()
    assert_identical(state, state_of(module))
    assert state["scale"] is not module.scale
    pipe = normed_pipe(
        without_data(), has_state=True, buffers={"scale": torch.tensor(3.0).double()}
    )
    assert pipe.init_state()["scale"] == 3


def test_buffers_that_no_checkpoint_has_are_refused_by_name(tmp_path: Path) -> None:
    module = normed_module()
    path = write_file(module, tmp_path)
    saved = load_file(path)
    scale = saved.pop("scale")
    save_file(saved, path)
    pipe = normed_pipe(without_data(), has_state=True)
    with pytest.raises(fpipe.BatchError, match="the checkpoint lacks 'scale': "):
        pipe.load_state(path)
    save_file(saved | {"scale": scale[None]}, path)
    with pytest.raises(fpipe.BatchError, match=r"'scale' has shape \(1,\), but the model's has \("):
        pipe.load_state(path)
    # Nobody can say what these are: no checkpoint has them, and the module does not make them.
    shapes = without_data()
    shapes.register_buffer("odd", torch.ones(2, device="meta"), persistent=False)
    save_file(saved | {"scale": scale}, path)
    odd = normed_pipe(shapes, has_state=True)
    for make in (odd.init_state, lambda: odd.load_state(path)):
        with pytest.raises(fpipe.StageError, match=r"the buffer 'odd' .*load_buffers\(module, pa"):
            make()
    plain = normed_pipe(module.eval())
    for make in (plain.init_state, lambda: plain.load_state(path)):
        with pytest.raises(fpipe.StageError, match=r"no state, has_state=True .*load_buffers"):
            make()


def test_state_of_a_function_is_loaded_by_the_paths_of_its_leaves(tmp_path: Path) -> None:
    pipe = fpipe.pipeline(state_model.without_aux, schedule=SCHEDULE, has_state=True, compile=False)
    state = state_model.make_state()
    saved = {"first.0": state["first"].mean, "first.1": state["first"].var}
    saved |= {"second.0": state["second"].mean + 1, "second.1": state["second"].var}
    saved |= {name: state[name] for name in ("drift", "count", "fixed")}
    save_file({n: v.contiguous().clone() for n, v in saved.items()}, tmp_path / "s.safetensors")
    shapes = pytree.tree_map(lambda leaf: leaf.to("meta"), state)
    got = pipe.load_state(tmp_path, shapes=shapes)
    moved = state["second"]._replace(mean=state["second"].mean + 1)
    assert_identical(got, {**state, "second": moved})
    with pytest.raises(fpipe.StageError, match="shapes is missing: pass a state as for step"):
        pipe.load_state(tmp_path)
    stages: list[Any] = [lambda w, x: x] * 4
    with pytest.raises(fpipe.StageError, match="the pipeline has no state"):
        fpipe.pipeline(stages, lambda y, _: y.sum(), SCHEDULE).load_state(tmp_path, shapes=shapes)


def test_buffers_of_a_shared_submodule_come_by_either_name(tmp_path: Path) -> None:
    shared = nn.BatchNorm1d(4)
    module = nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared)
    saved = {name: buffer + 1 for name, buffer in shared.named_buffers()}
    save_file({f"3.{name}": value for name, value in saved.items()}, tmp_path / "model.safetensors")
    buffers = fpipe.load_buffers(module, tmp_path)
    assert_identical(buffers, {f"1.{name}": value for name, value in saved.items()})
