"""`fpipe compare`: schedules side by side, the fastest first."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fpipe import schedules
from fpipe.cli import sources
from fpipe.cli.options import (
    Commands,
    add_cost,
    add_jitter,
    add_memory,
    cost_of,
    jitter_of,
    new_parser,
)
from fpipe.errors import ScheduleError
from fpipe.schedule.cost import Cost
from fpipe.schedule.schedule import Schedule
from fpipe.schedule.simulation.jitter import Jitter
from fpipe.schedule.simulator import simulate, with_whole_stage


def add_compare(commands: Commands[Any]) -> None:
    """Add the command `compare`."""
    parser = new_parser(
        commands,
        "compare",
        "simulate schedules and print a table of them, the fastest first",
        "fpipe compare 1f1b zb_h1 zbv --ranks 8 --microbatches 32 --cost 10,12,8 --comm 1\n\n"
        "  bubble  makespan less the work of the busiest rank\n"
        "  idle    part of all ranks' time in which they do nothing\n"
        "  peak    most activations on a rank\n"
        "  gap     how far the makespan is above what no schedule of that placement beats in\n"
        "          which no rank holds more than here\n"
        "  mean    of the makespans of trials with --jitter, and their standard deviation\n\n"
        + sources.FAMILIES,
    )
    parser.add_argument(
        "schedules",
        nargs="*",
        metavar="SCHEDULE",
        help=f"{sources.HELP}; none for all families",
    )
    sources.add_size(parser)
    add_cost(parser)
    add_memory(parser)
    add_jitter(parser)
    parser.set_defaults(run=_compare)


class Row(NamedTuple):
    """The figures of a schedule in the table."""

    makespan: float
    peak: float
    name: str
    stages: int
    bubble: float
    idle: float
    gap: float | None
    mean: float
    spread: float
    held: tuple[float, ...]  # the peak of each rank


def _compare(options: argparse.Namespace) -> None:
    cost, size = cost_of(options), sources.size_of(options)
    jitter = jitter_of(options)

    def measured(name: str, schedule: Schedule) -> Row:
        return measure(name, schedule, cost, jitter, options.trials)

    rows: list[Row] = []
    refused: list[str] = []
    if options.schedules:
        rows, refused = _measured(options.schedules, size, cost, options.memory, measured)
    else:
        for name in schedules.FAMILIES:
            try:
                rows.append(measured(name, sources.schedule_of(name, size, cost, options.memory)))
            except ScheduleError as refusal:
                if size.ranks is None or size.microbatches is None:
                    raise ScheduleError("give --ranks and --microbatches, or a file") from refusal
                refused.append(f"left out {name}: {refusal}")
    if options.memory is not None:
        rows, above = _within(options.memory, rows)
        refused += above
    if not rows:
        raise ScheduleError("\n".join(["there is nothing to compare", *refused]))
    print("\n".join([table(rows), *refused]))


def _within(memory: float | tuple[float, ...], rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """The rows that fit the memory, and a line on each of the others."""
    if not all(limit > 0 for limit in (memory if isinstance(memory, tuple) else (memory,))):
        raise ScheduleError(f"--memory {memory} must be a number above 0, or one for each rank")
    kept, above = [], []
    for row in rows:
        limits = memory if isinstance(memory, tuple) else (memory,) * len(row.held)
        if len(limits) != len(row.held):
            raise ScheduleError(
                f"--memory has {len(limits)} values and {row.name} {len(row.held)} ranks: give one "
                "per rank, or one number for all"
            )
        for rank, (held, limit) in enumerate(zip(row.held, limits, strict=True)):
            if not held <= limit * (1 + 1e-9):  # sums of fractions
                above.append(
                    f"left out {row.name}: rank {rank} holds {held:g}, and --memory is {limit:g}"
                )
                break
        else:
            kept.append(row)
    return kept, above


def _measured(
    names: Sequence[str],
    size: sources.Size,
    cost: Cost,
    memory: float | tuple[float, ...] | None,
    measured: Callable[[str, Schedule], Row],
) -> tuple[list[Row], list[str]]:
    """A row for each schedule, and a line on each family that does not fit the cost.

    If there is a file, the families have its size.
    """
    rows: list[Row] = []
    refused: list[str] = []
    files = [name for name in names if sources.is_file(name)]
    families = [name for name in names if not sources.is_file(name)]
    # Stages per rank are for the families, where there are any.
    expected = size._replace(stages_per_rank=None) if families else size
    for name in files:
        schedule = sources.schedule_of(name, expected)
        # Simulate it before a family takes its size, which is only reliable if it can run.
        try:
            rows.append(measured(name, schedule))
        except ScheduleError as error:
            raise ScheduleError(f"{name}: {error}") from error
        shape = schedule.num_ranks, schedule.num_microbatches
        if name != files[0] and shape != size[:2]:
            raise ScheduleError(
                f"{name} has {shape[0]} ranks and {shape[1]} microbatches, and {files[0]} has "
                f"{size.ranks} and {size.microbatches}: compare schedules of one size"
            )
        size = size._replace(ranks=shape[0], microbatches=shape[1])
    for name in families:
        try:
            rows.append(measured(name, sources.schedule_of(name, size, cost, memory)))
        except ScheduleError as error:
            sources.schedule_of(name, size)  # raises what is wrong whatever the cost
            if len(names) == 1:
                raise ScheduleError(f"{name}: {error}") from error
            refused.append(f"left out {name}: {error}")
    return rows, refused


def measure(name: str, schedule: Schedule, cost: Cost, jitter: Jitter | None, trials: int) -> Row:
    """Simulate a schedule, with the whole-stage work that the cost has, and measure it.

    Raises:
        ScheduleError: it cannot run, or the cost does not fit its placement.
    """
    schedule = with_whole_stage(schedule, cost)
    timeline = simulate(schedule, cost, jitter=jitter, trials=trials)
    room = timeline.makespan * schedule.num_ranks
    try:
        gap = timeline.gap
    except ScheduleError:
        gap = None  # of training steps alone there is a bound
    return Row(
        makespan=timeline.makespan,
        peak=max(timeline.peak),
        name=name if sources.is_file(name) else schedule.name,
        stages=schedule.num_stages,
        bubble=min(timeline.bubble),
        idle=sum(timeline.bubble) / room if room else 0.0,
        gap=gap,
        mean=timeline.mean,
        spread=timeline.spread,
        held=timeline.peak,
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as text, the fastest first, and of equals the one that holds less."""
    head = ["schedule", "stages", "makespan", "bubble", "idle", "peak", "gap"]
    shaken = any(row.spread for row in rows)
    head += ["mean", "spread"] if shaken else []
    lines = [
        [
            row.name,
            str(row.stages),
            f"{row.makespan:g}",
            f"{row.bubble:g}",
            f"{100 * row.idle:.1f} %",
            f"{row.peak:g}",
            "-" if row.gap is None else f"{100 * row.gap:.1f} %",
            *([f"{row.mean:.1f}", f"{row.spread:.1f}"] if shaken else []),
        ]
        for row in sorted(rows, key=(lambda row: row.mean) if shaken else None)
    ]
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (head, *lines)
    )
