"""Checkpoints of a sharded run: read under any other number of replicas, ranks and parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter

import fpipe
from fpipe import schedules
from tests.distributed import replicas
from tests.distributed.actors import Group
from tests.distributed.crew import Crew, mesh_of, values
from tests.models import assert_identical

STAGES: Final = 4
SAVED: Final = (2, 2)


def replicated(shape: tuple[int, int]) -> fpipe.Pipeline:
    """Four stages over so many replicas and ranks."""
    ranks = shape[1]
    family = "one_f_one_b" if ranks == STAGES else "interleaved_1f1b"
    options: Any = {} if ranks == STAGES else {"stages_per_rank": STAGES // ranks}
    schedule = schedules.get(family, ranks=ranks, microbatches=4, **options)
    first = replicas.recorded(mesh_of(shape, ("dp", "pp")), ("dp",), STAGES)
    return first.with_schedule(schedule)


def saved_layout(group: Group, path: str, writer: str) -> Any:
    """Divided parameters and gradients, saved by torch; returns both, whole, of this rank."""
    pipe = replicated(SAVED)
    params = pipe.shard(pipe.local(replicas.parameters(STAGES)))
    mesh = mesh_of(SAVED, ("dp", "pp"))
    grads = pipe.step(params, replicas.rows_of(mesh, ["dp"], replicas.data())).grads
    if writer == "torch":
        dcp.save(dict(pipe.own(params)), checkpoint_id=f"{path}/params")
        dcp.save(dict(pipe.own(grads)), checkpoint_id=f"{path}/grads")
    elif writer == "later":
        own = dist.new_group(backend="gloo")
        pending: Any = dcp.async_save(
            dict(pipe.own(params)), checkpoint_id=f"{path}/params", process_group=own
        )
        pipe.step(params, replicas.rows_of(mesh, ["dp"], replicas.data()))
        pending.result()
        dist.destroy_process_group(own)
    else:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, sorted(pipe.own(params)))
        # torch 2.13 writes zeros in place of tensors without dimensions when it consolidates.
        scales = {f"{stage}.scale" for stage in range(STAGES)}
        names = sorted({f"layers.{name}" for own in every for name in {*own} - scales})
        files = HuggingFaceStorageWriter(
            f"{path}/params",
            fqn_to_index_mapping=dict.fromkeys(names, 1),
            save_distributed=True,
            enable_consolidation=True,
        )
        dcp.save(
            {f"layers.{name}": value for name, value in pipe.own(params).items() if value.dim()},
            storage_writer=files,
        )
    return replicas.whole(params), replicas.whole(grads)


def read(group: Group, shape: tuple[int, int], path: str, rename: Any = None) -> Any:
    """What each rank reads under another layout, divided and put together again."""
    pipe = replicated(shape)
    params = pipe.load(path, shapes=replicas.parameters(STAGES), rename=rename)
    divided = pipe.shard(params)
    mesh = mesh_of(shape, ("dp", "pp"))
    pipe.step(divided, replicas.rows_of(mesh, ["dp"], replicas.data()))
    return replicas.whole(divided)


def parts_of(every: Any) -> list[Any]:
    """The part of each stage, from whichever rank has it."""
    return [next(own[s] for own in every if own[s] is not None) for s in range(STAGES)]


def test_what_one_layout_saves_any_other_reads(crew: Crew, tmp_path: Path) -> None:
    before = values(crew.run(saved_layout, str(tmp_path), "torch"))
    params, grads = (parts_of([own[at] for own in before]) for at in (0, 1))
    assert_identical(params, replicas.parameters(STAGES))
    for shape in ((1, 4), (4, 1), (2, 2)):
        for name, expected in (("params", params), ("grads", grads)):
            again = values(crew.run(read, shape, str(tmp_path / name)))
            for own in again:
                for stage, part in enumerate(own):
                    if part is not None:
                        assert_identical(part, expected[stage])
            assert len(parts_of(again)) == STAGES


@pytest.mark.parametrize("writer", ["later", "hugging face"])
def test_one_process_reads_what_four_have_saved(crew: Crew, tmp_path: Path, writer: str) -> None:
    values(crew.run(saved_layout, str(tmp_path), writer))
    schedule = schedules.interleaved_1f1b(ranks=1, microbatches=4, stages_per_rank=STAGES)
    pipe = fpipe.pipeline([replicas.stage] * STAGES, replicas.mean_square, schedule, compile=False)
    expected = replicas.parameters(STAGES)
    if writer == "later":
        assert_identical(pipe.load(tmp_path / "params", shapes=expected), expected)
        return

    def scale(key: Any, name: str, like: torch.Tensor) -> torch.Tensor:
        return expected[int(name.split(".")[0])]["scale"]

    read = pipe.load(
        tmp_path / "params",
        shapes=expected,
        rename=lambda name: f"layers.{name}",
        init_fn=scale,
    )
    assert_identical(read, expected)
    from safetensors import safe_open

    [file] = (tmp_path / "params").glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        assert len(opened.keys()) == 3 * STAGES
        assert torch.equal(opened.get_tensor("layers.0.into"), expected[0]["into"])
