"""How much faster does a GPT train on two ranks than on one, and beside torch's own pipelines?

    python -m benchmarks.versus_torch.run

See the README beside this file.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

import fpipe
from benchmarks import memory
from benchmarks.contest import (
    CPU,
    SHARED,
    Case,
    check,
    fpipe_pipeline,
    schedule_of,
    torch_pipeline,
)
from benchmarks.harness import (
    Cell,
    Report,
    Timings,
    add_arguments,
    add_uncompiled,
    command,
    machine,
    publish,
)
from benchmarks.ranks import greatest, interleave_ranks, on_ranks
from benchmarks.versus_torch.model import Size, make_problem
from benchmarks.versus_torch.unpipelined import OWN_WAYS, WAYS, unpipelined

MEBI: Final = 2**20
REFUSED: Final = "refused"
PIPELINES: Final = ("fpipe", "torch eager", "torch compiled")
BASE: Final = "torch unpipelined"
OWN_BASE: Final = "fpipe unpipelined"


def _ours_alone() -> list[str]:
    """The families of training schedules that torch has under no name."""
    shared = {schedule_of(name, 2, 8) for name in SHARED}
    return [name for name in fpipe.schedules.FAMILIES if schedule_of(name, 2, 8) not in shared]


# Schedules that torch does not have come after those that both have.
NAMES: Final = (*SHARED, *_ours_alone())

COLUMNS: Final = (
    "schedule",
    "fpipe, ms",
    "speed-up: fpipe",
    "torch eager",
    "torch compiled",
    "fpipe over itself unpipelined",
    "fpipe / best torch",
    "peak MiB: fpipe",
    "torch eager",
    "torch compiled",
    "planned by fpipe",
)


class Found(NamedTuple):
    """What the ranks found.

    Attributes:
        base: the fastest unpipelined way of torch on one thread.
        own_base: that of fpipe.
        unpipelined: rows of the table of unpipelined steps.
        rows: rows of the table.
        refusals: what torch said when it refused compiled stages, by schedule.
    """

    base: str
    own_base: str
    unpipelined: list[list[Cell]]
    rows: list[list[Cell]]
    refusals: dict[str, str]


def only_on_rank_0(case: Case) -> Callable[[], object]:
    """What each rank does while one process computes alone."""
    return case.run if dist.get_rank() == 0 else lambda: None


# ── without a pipeline ──────────────────────────────────────────────────────────────────────────


def measure_unpipelined(
    ways: Sequence[str], size: Size, rounds: int, compile: bool
) -> tuple[str, str, list[list[Cell]]]:
    """Find the fastest of `ways` and of fpipe's own on one thread, and what two threads give."""
    problem = make_problem(size, num_stages=2)
    cases = {
        f"{way}, {threads} thread{'s' * (threads > 1)}": unpipelined(
            problem, way, size.microbatches, threads, compile
        )
        for threads in (1, 2)
        for way in (*ways, *OWN_WAYS)
    }
    if dist.get_rank() == 0:
        check(problem, (0, 1), cases)
    runs = {name: only_on_rank_0(cases[name]) for name in cases}
    timings = interleave_ranks(runs, rounds, warmup=0)  # the check has warmed them up

    def fastest(ways: Sequence[str]) -> str:
        return min(ways, key=lambda way: timings.median(f"{way}, 1 thread"))

    base = fastest(ways)
    rows: list[list[Cell]] = [
        [name, timings.median(name) * 1e3, timings.ratio(f"{base}, 1 thread", name)]
        for name in cases
    ]
    return base, fastest(OWN_WAYS), rows


# ── on ranks ────────────────────────────────────────────────────────────────────────────────────


def peak_mebibytes(case: Case, before: int) -> float:
    """Most that a rank holds in a step, beside parameters and batch, on the rank that holds most.

    Args:
        case: has run before, so whatever it keeps from step to step is there.
        before: bytes held before the case was made.
    """
    case.clear()
    kept = memory.held() - before
    return greatest([(kept + memory.peak(case.run)) / MEBI])[0]


def measure(
    rank: int,
    world: int,
    names: Sequence[str],
    ways: Sequence[str],
    size: Size,
    rounds: int,
    compile: bool,
) -> Found:
    """On each rank: everything."""
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.ERROR)
    base, own_base, table = measure_unpipelined(ways, size, rounds, compile)
    rows, refusals = [], {}
    for name in names:
        schedule = schedule_of(name, world, size.microbatches)
        row, refusal = _measure(name, schedule, size, base, own_base, rounds, compile)
        rows.append(row)
        if refusal is not None:
            refusals[name] = refusal
    return Found(base, own_base, table, rows, refusals)


def _measure(
    name: str,
    schedule: fpipe.Schedule,
    size: Size,
    base: str,
    own_base: str,
    rounds: int,
    compile: bool,
) -> tuple[list[Cell], str | None]:
    """One row of the table, and why torch refused compiled stages, if it did."""
    problem = make_problem(size, schedule.num_stages)
    own = schedule.stages_of(dist.get_rank())
    cases: dict[str, Case] = {}
    peaks: dict[str, Cell] = dict.fromkeys(PIPELINES)
    refusal = None
    backend = "inductor" if compile else "eager"

    def add(case_name: str, make: Callable[[], Case]) -> None:
        before = memory.held()
        case = make()
        check(problem, own, {case_name: case})
        cases[case_name], peaks[case_name] = case, peak_mebibytes(case, before)

    add("fpipe", lambda: fpipe_pipeline(problem, schedule, compile))
    if name in SHARED:
        add("torch eager", lambda: torch_pipeline(problem, name, schedule, compile=False))
        try:
            add(
                "torch compiled",
                lambda: torch_pipeline(problem, name, schedule, compile=True, backend=backend),
            )
        except RuntimeError as error:
            refusal, peaks["torch compiled"] = str(error), REFUSED
    planned = None if (ask := cases["fpipe"].planned) is None else ask() / MEBI
    alone = {
        BASE: unpipelined(problem, base, size.microbatches),
        OWN_BASE: unpipelined(problem, own_base, size.microbatches, compile=compile),
    }
    runs = {way: only_on_rank_0(alone[way]) for way in alone}
    runs |= {case: cases[case].run for case in cases}
    timings = interleave_ranks(runs, rounds, warmup=1)
    speed: list[Cell] = [
        timings.ratio(BASE, case) if case in cases else (REFUSED if name in SHARED else None)
        for case in PIPELINES
    ]
    return [
        name,
        timings.median("fpipe") * 1e3,
        *speed,
        timings.ratio(OWN_BASE, "fpipe"),
        _best_ratio(timings, cases),
        *peaks.values(),
        planned,
    ], refusal


def _best_ratio(timings: Timings, cases: dict[str, Case]) -> float | None:
    """The time of fpipe over that of torch's faster way."""
    theirs = [case for case in cases if case != "fpipe"]
    return timings.ratio("fpipe", min(theirs, key=timings.median)) if theirs else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    for field, value in Size._field_defaults.items():
        parser.add_argument(f"--{field}", type=int, default=value)
    parser.add_argument("--schedule", choices=NAMES, action="append", help="only this one")
    parser.add_argument(
        "--unpipelined", choices=WAYS, action="append", help="only this way without a pipeline"
    )
    add_uncompiled(parser)
    add_arguments(parser, rounds=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = Size(*(getattr(arguments, field) for field in Size._fields))
    names = list(arguments.schedule or NAMES)
    ways = arguments.unpipelined or WAYS
    compile = not arguments.uncompiled
    found: Any = on_ranks(
        arguments.ranks, measure, arguments.ranks, names, ways, size, arguments.rounds, compile
    )
    report = Report(
        title="A GPT on two ranks beside torch.distributed.pipelining",
        command=command("benchmarks.versus_torch.run"),
        machine=machine(CPU),
        settings={
            "ranks": arguments.ranks,
            **size._asdict(),
            "rounds": arguments.rounds,
            "speed-up over": f"unpipelined, {found.base}, 1 thread",
            "itself unpipelined": f"{found.own_base}, 1 thread",
            **{
                f"{label} takes": f"{milliseconds:.0f} ms, a speed-up of {speed:.2f}"
                for label, milliseconds, speed in found.unpipelined
            },
            **{
                f"torch compiled, {name}": f"refused: {reason}"
                for name, reason in found.refusals.items()
            },
        },
        columns=COLUMNS,
        rows=found.rows,
    )
    publish(report, arguments)


if __name__ == "__main__":
    main()
