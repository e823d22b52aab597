"""The command `fpipe`: reads its arguments, runs a part, says in one line what is wrong."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Final

from fpipe.cli import comparing, searching, showing, simulating, verifying
from fpipe.cli.parsing import Parser
from fpipe.errors import ScheduleError
from fpipe.version import __version__

BAD_INPUT: Final = 2  # the exit code of every error of the user's, as in argparse
_PARTS: Final = (showing, simulating, comparing, searching, verifying)


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
    for part in _PARTS:
        part.add(commands)
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
