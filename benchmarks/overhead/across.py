"""The same question over a process group: one process per rank, and messages between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import fpipe
from benchmarks.contest import check, fpipe_pipeline, messages_alone, schedule_of, torch_pipeline
from benchmarks.harness import Cell
from benchmarks.overhead.problem import REPEATS, make_problem
from benchmarks.ranks import interleave_ranks, on_ranks

COLUMNS: Final = (
    "schedule",
    "actions a rank",
    "fpipe, µs",
    "fpipe uncompiled, µs",
    "torch, µs",
    "messages alone, µs",
    "fpipe / torch",
)


def measure(
    rank: int, world: int, names: Sequence[str], microbatches: int, rounds: int
) -> list[list[Cell]]:
    """On each rank: the rows of the table."""
    return [_measure(name, schedule_of(name, world, microbatches), rank, rounds) for name in names]


def _measure(name: str, schedule: fpipe.Schedule, rank: int, rounds: int) -> list[Cell]:
    problem = make_problem(schedule.num_stages, schedule.num_microbatches)
    cases = {
        "fpipe": fpipe_pipeline(problem, schedule, compile=True),
        "fpipe uncompiled": fpipe_pipeline(problem, schedule, compile=False),
        "torch": torch_pipeline(problem, name, schedule, compile=False),
    }
    check(problem, schedule.stages_of(rank), cases)
    steps = {case: cases[case].run for case in cases}
    steps["messages alone"] = messages_alone(problem, schedule)
    timings = interleave_ranks(steps, rounds, repeats=REPEATS)
    actions = max(map(len, schedule.actions))
    micros = [timings.median(case) / actions * 1e6 for case in steps]
    return [name, actions, *micros, timings.ratio("fpipe", "torch")]


def table(world: int, names: Sequence[str], microbatches: int, rounds: int) -> list[list[Cell]]:
    """The rows of the table, measured in fresh processes."""
    found: Any = on_ranks(world, measure, world, names, microbatches, rounds)
    return list(found)
