"""Where torch has a schedule, ours runs the same actions in the same order on every rank."""

from __future__ import annotations

from typing import Any

import pytest

from fpipe import ScheduleError, schedules
from tests.schedule import torch_orders

RANKS = range(1, 6)
MICROBATCHES = range(1, 13)


def ours(name: str, **arguments: Any) -> list[list[str]]:
    return [[str(action) for action in row] for row in schedules.get(name, **arguments).actions]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_single_stage_schedules(name: str, ranks: int) -> None:
    for microbatches in MICROBATCHES:
        size: Any = {"ranks": ranks, "microbatches": microbatches}
        if name == "1F1B" and microbatches < ranks:
            with pytest.raises(ValueError, match="must be greater than or equal"):
                torch_orders.single(name, **size)
            schedules.get(name, **size)  # torch refuses what runs well
        else:
            assert ours(name, **size) == torch_orders.single(name, **size), size


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"])
def test_looped_schedules(name: str, ranks: int, stages_per_rank: int) -> None:
    for microbatches in MICROBATCHES:
        size: Any = {"ranks": ranks, "microbatches": microbatches}
        size["stages_per_rank"] = stages_per_rank
        if name != "LoopedBFS" and microbatches % max(1, microbatches // ranks):
            with pytest.raises(ValueError, match="multiple of the number of rounds"):
                torch_orders.multi(name, **size)
            with pytest.raises(ScheduleError, match="must divide into rounds of one size"):
                schedules.get(name, **size)
        else:
            assert ours(name, **size) == torch_orders.multi(name, **size), size


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
def test_v_schedules(name: str, ranks: int) -> None:
    for microbatches in MICROBATCHES:
        size: Any = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": 2}
        if name == "DualPipeV" and microbatches < 2 * ranks:
            with pytest.raises(ValueError, match="at least as many microbatches as stages"):
                torch_orders.multi(name, **size)
            schedules.get(name, **size)
        else:
            assert ours(name, **size) == torch_orders.multi(name, **size), size
