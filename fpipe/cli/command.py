"""The command `fpipe`: reads its arguments, runs a subcommand, says in one line what is wrong."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any, Final

from fpipe.cli import sources
from fpipe.cli.comparing import add_compare
from fpipe.cli.options import Commands, Parser, new_parser
from fpipe.cli.reporting import add_search, add_simulate
from fpipe.errors import ScheduleError
from fpipe.schedule.grid import WIDTH, sizes, text_grid
from fpipe.schedule.verifier import verify
from fpipe.version import __version__

BAD_INPUT: Final = 2  # the exit code of every error of the user's, as in argparse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the words after ``fpipe``; None for those of the process.

    Returns:
        The exit code: 0, or 2 after one line on standard error where the input is bad.

    Raises:
        SystemExit: with 2 where argparse refuses the arguments, with 0 after ``--help`` and
            ``--version``.

    Example:
        >>> main(["show", "1f1b", "--ranks", "2", "--microbatches", "3"])
        one_f_one_b: 2 ranks, 2 stages, 3 microbatches
        time    0              5
        rank 0  F0 F1    B0 F2 B1    B2
        rank 1     F0 B0 F1 B1 F2 B2
        0
    """
    parser = Parser(
        prog="fpipe",
        description="Pipeline schedules: look at them, simulate, compare, search and check them.",
        epilog="example: fpipe compare 1f1b zb_h1 zbv --ranks 8 --microbatches 32 --cost 10,12,8",
    )
    parser.add_argument("--version", action="version", version=f"fpipe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_show, add_simulate, add_compare, add_search, _add_verify):
        add(commands)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        commands.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A name may have characters that the terminal's encoding lacks.
            sys.stdout.reconfigure(errors="backslashreplace")
        options.run(options)
        print(end="", flush=True)  # where there is no standard output, this does nothing
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. Python would complain once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ScheduleError as error:
        return _refuse(options.command, str(error))
    except OSError as error:
        where = "standard output" if error.filename is None else error.filename
        return _refuse(options.command, f"{where}: {error.strerror}")
    except MemoryError:
        return _refuse(
            options.command, "out of memory: take fewer ranks, microbatches or stages per rank"
        )
    except KeyboardInterrupt:
        return 130  # as a shell has it
    return 0


def _refuse(command: str, reason: str) -> int:
    print(f"fpipe {command}: error: {' '.join(reason.split())}", file=sys.stderr)
    return BAD_INPUT


def _add_show(commands: Commands[Any]) -> None:
    parser = new_parser(
        commands,
        "show",
        "print a schedule as a grid, or write it as a picture or in another form",
        "fpipe show zbv --ranks 4 --microbatches 8 --svg zbv.svg\n\n"
        "A column of the grid is a unit of time. F0 is the forward of microbatch 0, 2F0 that of\n"
        "stage 2; B is a full backward, I the gradient of a stage's input, W that of its weights.\n"
        f"\n{sources.described_families()}",
    )
    parser.add_argument("schedule", metavar="SCHEDULE", help=sources.HELP)
    sources.add_size(parser)
    parser.add_argument(
        "--all", action="store_true", help="print the whole of a long grid, with nothing left out"
    )
    sources.add_outputs(parser, (*sources.PICTURES, *sources.FILES))
    parser.set_defaults(run=_show)


def _show(options: argparse.Namespace) -> None:
    schedule = sources.schedule_of(options.schedule, sources.size_of(options))
    if not sources.write_outputs(options, (*sources.PICTURES, *sources.FILES), schedule):
        width = shutil.get_terminal_size((WIDTH, 24)).columns
        print(schedule.summary)
        bands = {"bands": None} if options.all else {}
        print(text_grid(schedule, width=max(width, WIDTH), **bands))


def _add_verify(commands: Commands[Any]) -> None:
    parser = new_parser(
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
    parser.set_defaults(run=_verify)


def _verify(options: argparse.Namespace) -> None:
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
