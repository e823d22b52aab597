"""What is very large is drawn in a moment, or refused at once."""

from __future__ import annotations

from typing import Any

import pytest

import fpipe
from fpipe import Cost, Schedule, ScheduleError, schedules
from fpipe.schedule.action import Action, Op
from fpipe.schedule.grid import text_grid


def one_by_one(ranks: int, microbatches: int) -> Schedule:
    """One microbatch after the other, so that nearly all of the grid is blank."""
    rows = [
        [Action(rank, op, m) for m in range(microbatches) for op in (Op.F, Op.B)]
        for rank in range(ranks)
    ]
    return Schedule(range(ranks), rows)


@pytest.mark.timeout(60)
def test_a_grid_costs_its_actions_and_not_its_blanks() -> None:
    """All cells were made, 80 million of them here, of which a few thousand are drawn."""
    lines = text_grid(one_by_one(200, 1_000)).splitlines()
    assert lines[0].startswith("time      0 ")
    assert lines[1].startswith("rank 0    F0")
    assert any("left out, which bands=None draws" in line for line in lines)
    assert lines[-200].rstrip().endswith("B999")


def test_bands_are_those_of_the_whole() -> None:
    schedule = one_by_one(5, 40)
    whole = text_grid(schedule, bands=None).split("\n\n")
    few = text_grid(schedule, bands=4).split("\n\n")
    assert few[:2] == whole[:2] and few[-2:] == whole[-2:] and len(few) == 5


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("options", "actions"),
    [
        ({}, "150,000,000 actions"),
        ({"placement": "linear"}, "75,000,000 actions"),
        ({"placement": list(range(5_000))}, "75,000,000 actions"),
        ({"iterations": 1}, "150,000,000 actions"),
    ],
)
def test_a_search_without_time_for_its_size_is_refused(options: Any, actions: str) -> None:
    """It went on for minutes, whatever the seconds."""
    with pytest.raises(
        ScheduleError, match=f"{actions}, of which .* seconds, and seconds=0.2: give"
    ):
        fpipe.search(
            ranks=5_000, microbatches=5_000, cost=Cost(f=1, i=1, w=1), seconds=0.2, **options
        )


@pytest.fixture
def large() -> Schedule:
    """Made ahead of the test that is timed: that takes longer than to refuse a search."""
    return schedules.gpipe(ranks=100, microbatches=4_000)


@pytest.mark.timeout(20, func_only=True)
def test_a_large_start_is_refused_too(large: Schedule) -> None:
    with pytest.raises(ScheduleError, match=r"1,200,000 actions.* take some 60 seconds"):
        fpipe.search(start=large, cost=Cost(f=1, i=1, w=1), seconds=1)
