"""CSV goes both ways: torch's own loader reads ours, and we read what torch itself writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from fpipe import Action, Op, Schedule, schedules, verify
from tests.schedule.torch_orders import FakeStage

SIZES = [(1, 2), (2, 4), (4, 8), (4, 12)]
MULTI = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def runtime(ranks: int, stages: int, microbatches: int) -> Any:
    """Torch's class that loads any schedule, on stages that hold no model."""
    held: Any = [FakeStage(index, ranks, stages) for index in range(stages // ranks)]
    return torch_schedules._PipelineScheduleRuntime(held, microbatches)


def texts(rows: Any) -> list[list[str]]:
    return [[str(action) for action in row] for row in rows]


@pytest.mark.parametrize("ranks, microbatches", SIZES)
@pytest.mark.parametrize("name", schedules.FAMILIES)
def test_torch_loads_what_we_write(
    name: str, ranks: int, microbatches: int, tmp_path: Path
) -> None:
    schedule = schedules.get(name, ranks=ranks, microbatches=microbatches)
    if any({op for _, op, _ in row} == {Op.F} for row in schedule.actions):
        pytest.skip("torch's loader demands a backward")
    path = tmp_path / "schedule.csv"
    schedule.to_csv(path)
    theirs = runtime(ranks, schedule.num_stages, microbatches)
    theirs._load_csv(
        str(path), format="compute_only"
    )  # raises where sends and receives cannot meet

    assert texts(theirs.pipeline_order.values()) == texts(schedule.actions)
    assert theirs.stage_index_to_group_rank == dict(enumerate(schedule.placement))


@pytest.mark.parametrize("ranks, microbatches", SIZES)
@pytest.mark.parametrize("name", MULTI)
def test_we_load_what_torch_writes(
    name: str, ranks: int, microbatches: int, tmp_path: Path
) -> None:
    ours = schedules.get(name, ranks=ranks, microbatches=microbatches, stages_per_rank=2)
    stages: Any = [FakeStage(index, ranks, 2 * ranks) for index in range(2)]
    theirs: Any = torch_schedules.get_schedule_class(name)(stages, microbatches)
    path = tmp_path / "theirs.csv"
    torch_schedules.PipelineScheduleMulti._dump_csv(theirs, str(path))

    read = Schedule.from_csv(path)
    verify(read)
    assert read == ours
    assert read.name == "theirs"


@pytest.mark.parametrize("ranks, microbatches", SIZES)
@pytest.mark.parametrize("name", MULTI)
def test_we_load_what_torch_writes_with_messages(
    name: str, ranks: int, microbatches: int, tmp_path: Path
) -> None:
    ours = schedules.get(name, ranks=ranks, microbatches=microbatches, stages_per_rank=2)
    theirs = runtime(ranks, 2 * ranks, microbatches)
    ours.to_csv(tmp_path / "ours.csv")
    theirs._load_csv(str(tmp_path / "ours.csv"))
    theirs._dump_csv(str(tmp_path / "theirs.csv"), format="compute_comms")
    assert "UNSHARD" in (tmp_path / "theirs.csv").read_text("utf-8")

    read = Schedule.from_csv(tmp_path / "theirs.csv")
    verify(read)  # whole-stage actions stay, and obey our rules
    computed = [[a for a in row if a.microbatch is not None] for row in read.actions]
    assert Schedule(read.placement, computed) == ours


def test_overlapped_pair_of_dualpipev_is_read_as_its_parts(tmp_path: Path) -> None:
    stages: Any = [FakeStage(index, 2, 4) for index in range(2)]
    theirs: Any = torch_schedules.ScheduleDualPipeV(stages, 4)
    path = tmp_path / "dualpipev.csv"
    theirs._dump_csv(str(path), format="compute_only")
    assert "(0F3;3B1)OVERLAP_F_B" in path.read_text("utf-8")

    row = Schedule.from_csv(path).actions[0]
    at = row.index(Action(0, Op.F, 3))
    assert texts([row[at : at + 2]]) == [["0F3", "3B1"]]


@pytest.mark.parametrize("ranks, microbatches", SIZES[1:])
def test_overlapped_pairs_of_dualpipev_are_those_of_torch(
    ranks: int, microbatches: int, tmp_path: Path
) -> None:
    ours = schedules.dualpipev(ranks=ranks, microbatches=microbatches)
    ours.to_csv(tmp_path / "ours.csv", overlap=True)
    assert Schedule.from_csv(tmp_path / "ours.csv") == ours

    read = runtime(ranks, 2 * ranks, microbatches)
    read._load_csv(str(tmp_path / "ours.csv"), format="compute_only")  # lowers it, too
    stages: Any = [FakeStage(index, ranks, 2 * ranks) for index in range(2)]
    theirs: Any = torch_schedules.ScheduleDualPipeV(stages, microbatches)
    mine, torchs = (
        [[str(action) for action in row if action is not None] for row in order.values()]
        for order in (read.pipeline_order, theirs.pipeline_order)
    )
    assert mine[:-1] == torchs[:-1]
    # On the last rank torch keeps one pair apart, which the order of actions does not tell.
    apart = f"{ranks - 1}F{ranks}", f"{ranks}B0"
    at = mine[-1].index(f"({apart[0]};{apart[1]})OVERLAP_F_B")
    assert [*mine[-1][:at], *apart, *mine[-1][at + 1 :]] == torchs[-1]

    theirs._dump_csv(str(tmp_path / "theirs.csv"), format="compute_only")
    assert Schedule.from_csv(tmp_path / "theirs.csv") == ours


@pytest.mark.parametrize("name", schedules.FAMILIES)
def test_whatever_is_written_overlapped_is_read_as_it_was(name: str, tmp_path: Path) -> None:
    schedule = schedules.get(name, ranks=2, microbatches=4)
    schedule.to_csv(tmp_path / "overlapped.csv", overlap=True)
    assert Schedule.from_csv(tmp_path / "overlapped.csv") == schedule
