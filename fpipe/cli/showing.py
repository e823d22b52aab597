"""`fpipe show`: a schedule as a grid, as a picture, or in another form of file."""

from __future__ import annotations

import argparse
import shutil
from typing import Any

from fpipe.cli import sources
from fpipe.cli.parsing import Commands, new
from fpipe.schedule.grid import WIDTH, text_grid


def add(commands: Commands[Any]) -> None:
    """Add the command."""
    parser = new(
        commands,
        "show",
        "print a schedule as a grid, or write it as a picture or in another form",
        "fpipe show zbv --ranks 4 --microbatches 8 --svg zbv.svg\n\n"
        "A column of the grid is a unit of time. F0 is the forward of microbatch 0, 2F0 that of\n"
        "stage 2; B is a full backward, I the gradient of a stage's input, W that of its weights.\n"
        f"\n{sources.told_families()}",
    )
    parser.add_argument("schedule", metavar="SCHEDULE", help=sources.HELP)
    sources.add_size(parser)
    parser.add_argument(
        "--all", action="store_true", help="print the whole of a long grid, with nothing left out"
    )
    sources.add_outputs(parser, (*sources.PICTURES, *sources.FILES))
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    schedule = sources.schedule_of(options.schedule, sources.size_of(options))
    if not sources.write_outputs(options, (*sources.PICTURES, *sources.FILES), schedule):
        width = shutil.get_terminal_size((WIDTH, 24)).columns
        print(schedule.summary)
        bands = {"bands": None} if options.all else {}
        print(text_grid(schedule, width=max(width, WIDTH), **bands))
