"""Does a schedule take the time, and hold the memory, that fpipe says before it runs?

    python -m benchmarks.prediction.run

See the README beside this file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
from benchmarks import memory
from benchmarks.contest import CPU, Problem, schedule_of, stages_and_loss
from benchmarks.efficiency import naps
from benchmarks.efficiency.run import make_problem as make_naps
from benchmarks.harness import Cell, Report, add_arguments, command, machine, publish
from benchmarks.ranks import on_ranks
from benchmarks.versus_torch.model import Size
from benchmarks.versus_torch.model import make_problem as make_gpt

SCHEDULES: Final = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")

COLUMNS: Final = (
    "stages",
    "schedule",
    "predicted, ms",
    "measured, ms",
    "predicted / measured",
    "predicted peak, MiB",
    "measured peak, MiB",
    "peak, predicted / measured",
)


WIDE: Final = 4096
"""How many values of each row a sleeping stage keeps for its backward."""


def make_wide_naps(schedule: fpipe.Schedule) -> Problem:
    """Stages that sleep, and hold enough for a peak to be one."""
    problem = make_naps(schedule, 0.01)
    generator = torch.Generator().manual_seed(0)

    def widened(function: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        def stage(params: Any, x: Tensor) -> Tensor:
            napping, up, down = params
            y = function(napping, x)
            return y + torch.sin(y @ up) @ down

        return stage

    functions = {function: widened(function) for function in problem.functions}
    up = torch.randn(naps.WIDTH, WIDE, generator=generator)
    return replace(
        problem,
        functions=[functions[function] for function in problem.functions],
        params=[(own, up, up.t() / WIDE) for own in problem.params],
    )


def pipeline_of(problem: Problem, schedule: fpipe.Schedule, compile: bool) -> fpipe.Pipeline:
    """The problem's stages over all processes."""
    stages, loss = stages_and_loss(problem)
    return fpipe.pipeline(stages, loss, schedule, compile=compile, group=dist.group.WORLD)


def measure(
    rank: int, world: int, kind: str, names: Sequence[str], microbatches: int, rounds: int
) -> list[list[Cell]]:
    """On each rank: the rows of the table."""
    return [_measure(rank, world, kind, name, microbatches, rounds) for name in names]


def _measure(
    rank: int, world: int, kind: str, name: str, microbatches: int, rounds: int
) -> list[Cell]:
    schedule = schedule_of(name, world, microbatches)
    sleeps = kind == "sleeping"
    problem = (
        make_wide_naps(schedule)
        if sleeps
        else make_gpt(Size(microbatches=microbatches), schedule.num_stages)
    )
    pipe = pipeline_of(problem, schedule, compile=not sleeps)
    params, batch = pipe.local(problem.params), (problem.inputs, problem.targets)
    pipe.step(params, batch)
    cost = fpipe.profile(pipe, params, batch, steps=rounds)
    predicted = fpipe.simulate(schedule, cost).makespan
    # What was profiled and what is predicted take turns with the step only by being near in time:
    # a machine that slows down between them shows here as an error.
    with fpipe.record() as recording:
        for _ in range(rounds):
            pipe.step(params, batch)
    measured = median(timeline.makespan for timeline in recording.timelines)
    # Its first step, so that the receive buffers, which are kept from step to step, count too.
    fresh = pipeline_of(problem, schedule, compile=not sleeps)
    own = float(fresh.programs(params, batch)[rank].peak_bytes)
    real = float(memory.peak(lambda: fresh.step(params, batch)))
    peaks = torch.tensor([own, real], dtype=torch.float64)
    everyone = [torch.empty_like(peaks) for _ in range(world)]
    dist.all_gather(everyone, peaks)
    # The rank that is predicted to hold most decides what memory a run needs.
    most, held = max(everyone, key=lambda pair: pair[0].item()).tolist()
    mib = 2**20
    return [
        kind, name, predicted * 1e3, measured * 1e3, predicted / measured,
        most / mib, held / mib, most / held,
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", choices=SCHEDULES, action="append", help="only this one")
    parser.add_argument("--kind", choices=("sleeping", "gpt"), action="append", help="only this")
    add_arguments(parser, rounds=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = list(arguments.schedule or SCHEDULES)
    rows: list[list[Cell]] = []
    for kind, ranks in (("sleeping", 4), ("gpt", 2)):
        if kind in (arguments.kind or (kind,)):
            rows += on_ranks(
                ranks, measure, ranks, kind, names, arguments.microbatches, arguments.rounds
            )
    report = Report(
        title="What fpipe predicts over what is measured",
        command=command("benchmarks.prediction.run"),
        machine=machine(CPU),
        settings={"microbatches": arguments.microbatches, "rounds": arguments.rounds},
        columns=COLUMNS,
        rows=rows,
    )
    publish(report, arguments)


if __name__ == "__main__":
    main()
