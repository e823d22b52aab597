"""`fpipe search`: the best schedule for given costs and memory."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any, Final

from fpipe.cli import sources
from fpipe.cli.parsing import Commands, add_cost, add_memory, cost_of, count, new
from fpipe.cli.simulating import LEGEND, report
from fpipe.errors import ScheduleError
from fpipe.schedule.exchange.files import is_number, save
from fpipe.schedule.placements import NAMES
from fpipe.schedule.searching.finder import search

_FORMS: Final = {".csv": "csv", ".json": "json", ".txt": "text", ".svg": "svg", ".html": "html"}


def add(commands: Commands[Any]) -> None:
    """Add the command."""
    parser = new(
        commands,
        "search",
        "search for the best schedule for given costs and memory",
        "fpipe search --ranks 4 --microbatches 12 --cost 10,12,8 --comm 1 --memory 3 -o best.csv"
        f"\n\n{LEGEND}",
    )
    parser.add_argument(
        "-p",
        "--ranks",
        type=count,
        metavar="P",
        help="number of ranks (default: that of --start)",
    )
    parser.add_argument(
        "-m",
        "--microbatches",
        type=count,
        metavar="M",
        help="number of microbatches (default: that of --start)",
    )
    add_cost(parser)
    add_memory(parser)
    parser.add_argument(
        "--placement",
        metavar="PLACEMENT",
        help="linear, looped, v or wave (two waves, four stages per rank), or the rank of each "
        "stage, such as 0,1,1,0 (default: the best of the first three)",
    )
    parser.add_argument(
        "--start", metavar="FILE", help="a schedule to be bettered, whose placement is searched"
    )
    parser.add_argument(
        "--objective",
        choices=("makespan", "span"),
        default="makespan",
        help="what to make small (default: makespan)",
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="time to search (default: 10)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of all random choices (default: 0)"
    )
    parser.add_argument(
        "--iterations",
        type=int,
        metavar="N",
        help="work to do in place of --seconds, for the same result on every machine",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=f"write the schedule, in the form of the suffix: {', '.join(_FORMS)}",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    if options.start is None:
        for option in ("ranks", "microbatches"):
            if getattr(options, option) is None:
                raise ScheduleError(f"--{option} is needed, or --start with a schedule")
    sources.check_room(options.ranks or 1, options.microbatches or 1)
    form = None
    if options.output is not None:
        form = _FORMS.get(Path(options.output).suffix)
        if form is None:
            raise ScheduleError(
                f"--output {options.output}: the suffix must be one of {', '.join(_FORMS)}"
            )
        _check_output(Path(options.output))  # before it searches, not after
    found = search(
        ranks=options.ranks,
        microbatches=options.microbatches,
        cost=cost_of(options),
        memory=options.memory,
        placement=_placement(options.placement),
        start=None if options.start is None else sources.read(options.start),
        objective=options.objective,
        seconds=options.seconds,
        seed=options.seed,
        iterations=options.iterations,
    )
    # The bound of the search is another: of all its placements, in the memory that was given.
    print(report(found.timeline, shutil.get_terminal_size().columns, bounded=False))
    proof = "no schedule is better" if found.gap == 0 else f"at most {100 * found.gap:.1f} % better"
    print(
        f"searched: {found.objective} {found.value:g}, lower bound {found.bound:g} ({proof}), "
        f"{found.iterations} iterations"
    )
    if form is not None:
        drawn = found.timeline if form in sources.PICTURES else found.schedule
        save(options.output, getattr(drawn, f"to_{form}")())
        print(f"wrote {options.output}")


def _check_output(path: Path) -> None:
    if not path.parent.is_dir():
        raise ScheduleError(f"--output {path}: there is no such directory")
    if path.is_dir():
        raise ScheduleError(f"--output {path}: is a directory; give a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ScheduleError(f"--output {path}: may not be written")


def _placement(text: str | None) -> Any:
    if text is None or text in NAMES:
        return text
    words = text.split(",")
    if not all(map(is_number, words)):
        raise ScheduleError(
            f"--placement {text!r:.60} must be {', '.join(NAMES)}, or the rank of each stage, "
            "such as 0,1,1,0"
        )
    return tuple(map(int, words))
