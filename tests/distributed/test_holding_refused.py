"""What one rank cannot make or read is known on all, and they can go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import fpipe
from fpipe import Schedule, random, schedules
from fpipe.nn import buffers_of
from tests.distributed.crew import Crew, Outcome, attempt, values
from tests.distributed.test_holding import normal, weightless
from tests.models import assert_identical
from tests.modules import normed
from tests.modules.helpers import detached, squares
from tests.modules.models import language_model, token_batch


def make_with_own_keys(group: dist.ProcessGroup) -> list[Outcome]:
    """Each rank draws from another key; one has none; then they have the same."""
    stages = [lambda w, x: x @ w] * 2
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(stages, squares, schedule, compile=False, group=group)
    shapes = [torch.empty(3, 3, device="meta")] * 2

    def make(key: Any) -> Outcome:
        return attempt(lambda: len(pipe.init(normal, key, shapes=shapes)))

    rank = group.rank()
    return [make(random.key(rank)), make(random.key(3) if rank else 3), make(random.key(3))]


def test_ranks_that_draw_from_other_keys_are_refused(crew: Crew) -> None:
    """What several of them hold differed, and the loss was that of no model."""
    for other, wrong, right in values(crew.run(make_with_own_keys, ranks=range(2))):
        assert "rank 1 got another key than the other ranks" in other.error.text
        assert "key" in wrong.error.text and "3" in wrong.error.text
        assert right.value == 2


def load_state_on_one(group: dist.ProcessGroup, schedule: Schedule, path: Path) -> list[Outcome]:
    """Rank 1 has no checkpoint at first; then both read it."""
    pipe = fpipe.from_module(
        normed.without_data(),
        schedule=schedule,
        cuts=normed.CUTS,
        loss=squares,
        has_state=True,
        compile=False,
        group=group,
    )
    failed = attempt(pipe.load_state, path / "nowhere" if group.rank() else path)
    return [failed, attempt(lambda: sorted(buffers_of(pipe.load_state(path))))]


def test_rank_that_cannot_read_a_state_is_known_on_all(crew: Crew, tmp_path: Path) -> None:
    path = normed.write_file(normed.normed_module(), tmp_path)
    schedule = schedules.zbv(ranks=2, microbatches=4)
    here, there = values(crew.run(load_state_on_one, schedule, path, ranks=range(2)))
    assert here[0].error.kind == "PipelineError" and here[0].error.rank == 1
    assert "rank 1 cannot make or read its state: BatchError: " in here[0].error.text
    assert there[0].error.kind == "BatchError" and "nowhere holds nothing" in there[0].error.text
    names = ["calls", "norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
    assert here[1].value == there[1].value == [*names, "scale", "table"]


def load_on_one(
    group: dist.ProcessGroup, schedule: Schedule, path: Path
) -> tuple[Outcome, fpipe.Step]:
    """Rank 1 has no checkpoint at first; then both read it."""
    pipe, batch = weightless(group, schedule), token_batch()
    failed = attempt(pipe.load, path / "nowhere" if group.rank() else path, batch)
    return failed, pipe.step(pipe.load(path, batch), batch)


def test_rank_that_cannot_read_is_known_on_all_and_they_go_on(crew: Crew, tmp_path: Path) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=4)
    save_file(detached(language_model()), tmp_path / "model.safetensors")
    here, there = values(crew.run(load_on_one, schedule, tmp_path, ranks=range(2)))
    assert here[0].error.kind == "PipelineError" and here[0].error.rank == 1
    assert "rank 1 cannot make or read its parameters: BatchError: " in here[0].error.text
    assert there[0].error.kind == "BatchError" and "nowhere holds nothing" in there[0].error.text
    assert_identical(here[1].loss, there[1].loss)


def load_what_is_broken(group: dist.ProcessGroup, schedule: Schedule, path: Path) -> Outcome:
    """The copy of rank 1 lacks the file of the tensors."""
    return attempt(weightless(group, schedule).load, path / f"{group.rank()}", token_batch())


def test_rank_whose_distributed_checkpoint_is_broken_is_known_on_all(
    crew: Crew, tmp_path: Path
) -> None:
    """torch raises what is no Exception, and the other rank waited for ever."""
    for copy in ("0", "1"):
        with pytest.warns(UserWarning, match="to save in a single process"):
            dcp.save(detached(language_model()), checkpoint_id=tmp_path / copy, no_dist=True)
    (tmp_path / "1" / "__0_0.distcp").unlink()
    schedule = schedules.zbv(ranks=2, microbatches=4)
    here, there = values(crew.run(load_what_is_broken, schedule, tmp_path, ranks=range(2)))
    assert "rank 1 cannot make or read its parameters: BatchError: " in here.error.text
    assert there.error.kind == "BatchError"
    assert "1 cannot be read: FileNotFoundError: [Errno 2] No such file" in there.error.text


def init_refused_on_one(group: dist.ProcessGroup, schedule: Schedule) -> list[Outcome]:
    """Each call is wrong on rank 1 alone, and known to be before ranks meet; the last is right."""
    pipe, batch, odd = weightless(group, schedule), token_batch(), bool(group.rank())
    key = random.key(0)
    return [
        attempt(pipe.init, normal, key, *(() if odd else (batch,))),
        attempt(pipe.init, normal, key.double() if odd else key, batch),
        attempt(lambda: pipe.init(normal, key, batch, shapes=[1] if odd else None)),
        attempt(lambda: sorted(pipe.init(normal, key, batch))),
    ]


def test_what_one_rank_refuses_at_once_is_known_on_all(crew: Crew) -> None:
    """Else the other would wait for a rank that is alive and does not come."""
    schedule = schedules.zbv(ranks=2, microbatches=4)
    here, there = values(crew.run(init_refused_on_one, schedule, ranks=range(2)))
    reasons = ["is not known before the function is traced", "fpipe.random.key", "shapes"]
    for mine, other, reason in zip(here, there, reasons, strict=False):
        assert mine.error.kind == "PipelineError" and mine.error.rank == 1
        assert mine.error.text.startswith("rank 1 cannot make") and reason in mine.error.text
        assert other.error.kind != "PipelineError" and reason in other.error.text
    assert here[3].value == there[3].value == sorted(detached(language_model()))


def without_example(group: dist.ProcessGroup, schedule: Schedule) -> None:
    weightless(group, schedule).init(normal, random.key(0))


def without_data(group: dist.ProcessGroup, schedule: Schedule) -> None:
    """Rank 1 takes rank 0's parameters."""
    pipe, batch = weightless(group, schedule), token_batch()
    params = pipe.init(normal, random.key(0), batch)
    if group.rank() == 1:
        shapes = {name: value.to("meta") for name, value in params.items()}
        params = shapes
    pipe.step(params, batch)


def test_what_ranks_lack_is_refused(crew: Crew) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=4)
    for outcome in crew.run(without_example, schedule, ranks=range(2)):
        assert "pass an example of the batch, as in pipe.init(" in outcome.error.text
    for outcome in crew.run(without_data, schedule, ranks=range(2)):
        assert outcome.error.rank == 1 and outcome.error.stage == 1
        assert "reads the parameter ['blocks.1" in outcome.error.text
        assert "lies on the meta device" in outcome.error.text
