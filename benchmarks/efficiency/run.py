"""How much of the time that a schedule allows is lost between its actions?

    python -m benchmarks.efficiency.run

See the README beside this file.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F

import fpipe
from benchmarks.contest import (
    CPU,
    SHARED,
    Problem,
    check,
    fpipe_pipeline,
    messages_alone,
    schedule_of,
    torch_pipeline,
)
from benchmarks.efficiency import naps
from benchmarks.harness import (
    Cell,
    Report,
    add_arguments,
    add_awake,
    add_uncompiled,
    awake,
    command,
    machine,
    publish,
)
from benchmarks.ranks import interleave_ranks, on_ranks
from fpipe.schedule import Op

ROWS: Final = 4  # in a microbatch

COLUMNS: Final = (
    "schedule",
    "allowed, ms",
    "sleeping alone",
    "messages and naps",
    "fpipe",
    "fpipe uncompiled",
    "torch",
    "fpipe lost, ms",
    "torch lost, ms",
)


def allowed(schedule: fpipe.Schedule, seconds: float) -> float:
    """Seconds that the schedule takes if F, I and W take `seconds` each and messages none."""
    each = [seconds] * schedule.num_stages
    return fpipe.simulate(schedule, fpipe.Cost(f=each, i=each, w=each)).makespan


def make_problem(schedule: fpipe.Schedule, seconds: float) -> Problem:
    generator = torch.Generator().manual_seed(0)
    shape = (schedule.num_microbatches * ROWS, naps.WIDTH)
    return Problem(
        functions=[partial(naps.stage, seconds=seconds)] * schedule.num_stages,
        params=[naps.init(seed) for seed in range(schedule.num_stages)],
        loss=F.mse_loss,
        inputs=torch.randn(shape, generator=generator),
        targets=torch.randn(shape, generator=generator),
    )


def measure(
    rank: int,
    world: int,
    names: Sequence[str],
    microbatches: int,
    seconds: float,
    rounds: int,
    compile: bool,
) -> list[list[Cell]]:
    """On each rank: the rows of the table."""
    return [
        _measure(name, schedule_of(name, world, microbatches), rank, seconds, rounds, compile)
        for name in names
    ]


def _measure(
    name: str, schedule: fpipe.Schedule, rank: int, seconds: float, rounds: int, compile: bool
) -> list[Cell]:
    problem, ideal = make_problem(schedule, seconds), allowed(schedule, seconds)
    cases = {
        "fpipe": fpipe_pipeline(problem, schedule, compile),
        "fpipe uncompiled": fpipe_pipeline(problem, schedule, compile=False),
        "torch": torch_pipeline(problem, name, schedule, compile=False),
    }
    check(problem, schedule.stages_of(rank), cases)

    def sleep() -> None:
        # The critical path of the schedule, slept through without any library.
        for _ in range(round(ideal / seconds)):
            time.sleep(seconds)

    rows = torch.zeros(ROWS, naps.WIDTH)

    def doze(action: fpipe.Action) -> None:
        for _ in range(2 if action.op == Op.B else 1):
            torch.ops.fpipe_naps.nap(rows, seconds)

    steps = {case: cases[case].run for case in cases}
    bare = {
        "sleeping alone": sleep,
        "messages and naps": messages_alone(problem, schedule, doze),
    }
    timings = interleave_ranks({**bare, **steps}, rounds)
    shares = [ideal / timings.median(case) for case in (*bare, *cases)]
    lost = [(timings.median(case) - ideal) * 1e3 for case in ("fpipe", "torch")]
    return [name, ideal * 1e3, *shares, *lost]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=10.0, help="of each F, I and W")
    parser.add_argument("--schedule", choices=SHARED, action="append", help="only this one")
    add_awake(parser)
    add_uncompiled(parser)
    add_arguments(parser, rounds=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ranks, microbatches, rounds = arguments.ranks, arguments.microbatches, arguments.rounds
    names = list(arguments.schedule or SHARED)
    seconds = arguments.milliseconds / 1e3
    compile = not arguments.uncompiled
    with awake(arguments.awake):
        rows: Any = on_ranks(ranks, measure, ranks, names, microbatches, seconds, rounds, compile)
    report = Report(
        title="The time that a schedule allows over the time that it takes",
        command=command("benchmarks.efficiency.run"),
        machine=machine(CPU),
        settings={
            "ranks": ranks,
            "microbatches": microbatches,
            "F, I and W sleep": f"{arguments.milliseconds:g} ms each",
            "rounds": rounds,
        },
        columns=COLUMNS,
        rows=rows,
    )
    publish(report, arguments)


if __name__ == "__main__":
    main()
