"""`fpipe verify`: prove that the schedule in a file is whole and can run."""

from __future__ import annotations

import argparse
from typing import Any

from fpipe.cli import sources
from fpipe.cli.parsing import Commands, new
from fpipe.errors import ScheduleError
from fpipe.schedule.grid import sizes
from fpipe.schedule.verifier import verify


def add(commands: Commands[Any]) -> None:
    """Add the command."""
    parser = new(
        commands,
        "verify",
        "prove that schedules in files are whole and can run; exit with 2 at the first that is not",
        "fpipe verify best.csv",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a .csv, .json or .txt file")
    parser.add_argument(
        "--requires",
        metavar="OPS[,OPS...]",
        help="what each stage owes: F, FI, FW or FIW, once for all or for each stage "
        "(default: FIW; a schedule of evaluation needs F)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    requires = None
    if options.requires is not None:
        words = options.requires.split(",")
        requires = words[0] if len(words) == 1 else words
    for path in options.files:
        schedule = sources.read(path)
        try:
            verify(schedule, requires)
        except ScheduleError as error:
            raise ScheduleError(f"{path}: {error}") from error
        size = sizes(schedule.num_ranks, schedule.num_stages, schedule.num_microbatches)
        print(f"{path}: can run: {size}")
