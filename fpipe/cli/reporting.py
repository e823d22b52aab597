"""`fpipe simulate` and `fpipe search`: the timeline of a schedule, and what the step waits for."""

from __future__ import annotations

import argparse
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from fpipe.cli import sources
from fpipe.cli.options import (
    Commands,
    add_cost,
    add_jitter,
    add_memory,
    cost_of,
    count,
    jitter_of,
    new_parser,
    numbers,
)
from fpipe.errors import ScheduleError
from fpipe.schedule.exchange.files import is_number, save
from fpipe.schedule.orders.problem import LARGE
from fpipe.schedule.placements import NAMES
from fpipe.schedule.searching.finder import search
from fpipe.schedule.searching.result import USUAL
from fpipe.schedule.simulator import simulate, with_whole_stage
from fpipe.schedule.timeline import Timeline

LEGEND: Final = """\
A letter of the timeline is what a rank mostly does in that part of the time:
F forward, B full backward, I input gradient, W weight gradient, in small
letters for the later stages of the rank, and . for nothing.

  makespan       from the first start to the last end
  span           of the rank that takes longest, from its own first start to its last end
  bubble         makespan less the work of the busiest rank
  peak           most activations on a rank
  bound          a time that no schedule of that placement beats in which no rank
                 holds more than here
  gap            how far the makespan is above the bound
  mean, spread   of the makespans of trials in which times vary
  critical path  the actions that the last end waited for"""
_OUTPUTS: Final = {".csv": "csv", ".json": "json", ".txt": "text", ".svg": "svg", ".html": "html"}


def add_simulate(commands: Commands[Any]) -> None:
    """Add the command `simulate`."""
    parser = new_parser(
        commands,
        "simulate",
        "simulate a schedule: print its timeline, or write it as a picture",
        "fpipe simulate zb_h1 --ranks 4 --microbatches 8 --cost 10,12,8 --comm 1 --html zb.html"
        f"\n\n{LEGEND}\n\n{sources.FAMILIES}",
    )
    parser.add_argument("schedule", metavar="SCHEDULE", help=sources.HELP)
    sources.add_size(parser)
    add_cost(parser)
    add_jitter(parser)
    sources.add_outputs(parser, sources.PICTURES)
    parser.set_defaults(run=_simulate)


def _simulate(options: argparse.Namespace) -> None:
    cost = cost_of(options)
    schedule = sources.schedule_of(options.schedule, sources.size_of(options), cost)
    timeline = simulate(
        with_whole_stage(schedule, cost), cost, jitter=jitter_of(options), trials=options.trials
    )
    if not sources.write_outputs(options, sources.PICTURES, timeline):
        print(_report(timeline, shutil.get_terminal_size().columns))


def _report(timeline: Timeline, width: int, *, bounded: bool = True) -> str:
    """The timeline to scale, its figures, and what the step waited for.

    Unless it is bounded, it does not tell the bound of its placement and peaks.
    """
    width = max(width, 60)
    facts = [
        f"makespan {timeline.makespan:g}",
        f"span {timeline.span:g}",
        f"bubble {min(timeline.bubble):g}",
        f"peak {max(timeline.peak):g}",
    ]
    if timeline.trials:
        facts.append(f"mean {timeline.mean:g}, spread {timeline.spread:.2g}")
    unbounded = []
    if bounded:
        try:
            facts += [f"bound {timeline.bound:g}", f"gap {100 * timeline.gap:.1f} %"]
        except ScheduleError as reason:
            unbounded.append(f"no bound: {reason}")
    path = [str(event.action) for event in timeline.critical_path]
    return "\n".join(
        [
            str(timeline.schedule).partition("\n")[0],
            timeline.to_text(width=width),
            ", ".join(facts),
            *unbounded,
            _shortened(f"critical path, {len(path)} actions:", path, width),
        ]
    )


def _shortened(head: str, words: list[str], width: int) -> str:
    """As many of the first and the last words as fit behind `head`."""
    room = width - len(head) - 5
    if len(" ".join(words)) <= room:
        return " ".join([head, *words])
    fit = max(1, room // (2 * (max(map(len, words)) + 1)))
    return " ".join([head, *words[:fit], "...", *words[-fit:]])


def add_search(commands: Commands[Any]) -> None:
    """Add the command `search`."""
    parser = new_parser(
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
        choices=("makespan", "span", "robust"),
        default="makespan",
        help="what to make small; robust: the mean makespan under --jitter (default: makespan)",
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
        "--jitter",
        type=numbers,
        metavar="J[,R[,P,S]]",
        help="how times vary, as for fpipe simulate (default: 0.05)",
    )
    parser.add_argument(
        "--remat",
        action="store_true",
        help="choose for each stage as well whether it keeps its activation or computes it again",
    )
    parser.add_argument(
        "--cut",
        action="store_true",
        help="the cost is a file with a value for each layer: choose the layers of each stage, too",
    )
    for name, what in (
        ("recompute", "time by which a backward that computes again is longer (default: F)"),
        ("kept", "what F keeps there, such as the input of the stage, in the unit of --memory"),
    ):
        parser.add_argument(f"--{name}", type=float, metavar=name[0].upper(), help=what)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=f"write the schedule, in the form of the suffix: {', '.join(_OUTPUTS)}",
    )
    parser.set_defaults(run=_search)


def _search(options: argparse.Namespace) -> None:
    if options.start is None:
        for option in ("ranks", "microbatches"):
            if getattr(options, option) is None:
                raise ScheduleError(f"--{option} is needed, or --start with a schedule")
    sources.check_room(options.ranks or 1, options.microbatches or 1)
    form = None
    if options.output is not None:
        form = _OUTPUTS.get(Path(options.output).suffix)
        if form is None:
            raise ScheduleError(
                f"--output {options.output}: the suffix must be one of {', '.join(_OUTPUTS)}; a "
                "picture is an .svg, or an .html page"
            )
        _check_output(Path(options.output))  # before it searches, not after
    cost = cost_of(options)
    for name in ("recompute", "kept"):
        if (value := getattr(options, name)) is not None:
            cost = replace(cost, **{name: value})
    result = search(
        ranks=options.ranks,
        microbatches=options.microbatches,
        cost=cost,
        memory=options.memory,
        placement=_placement(options.placement),
        start=None if options.start is None else sources.read(options.start),
        objective=options.objective,
        seconds=options.seconds,
        seed=options.seed,
        iterations=options.iterations,
        remat=options.remat,
        cut=options.cut,
        jitter=jitter_of(options) or USUAL,
    )
    # The bound of the search is another: of all its placements, in the memory that was given.
    print(_report(result.timeline, shutil.get_terminal_size().columns, bounded=False))
    proof = (
        "no schedule is better" if result.gap == 0 else f"at most {100 * result.gap:.1f} % better"
    )
    print(
        f"searched: {result.objective} {result.value:g}, lower bound {result.bound:g} ({proof}), "
        f"{result.iterations} iterations"
    )
    if sum(map(len, result.schedule.actions)) <= LARGE and result.best_family is not None:
        family = result.best_family
        print(
            f"at 5 % jitter: mean {result.shaken.mean:g}, {abs(100 * result.loss):.1f} % "
            f"{'more' if result.loss > 0 else 'less'} than {family.schedule.name} "
            f"({family.mean:g})"
        )
    if result.cut is not None:
        ranks = " ".join(map(str, result.schedule.placement))
        print(f"cut: {' '.join(map(str, result.cut))} layers, on ranks {ranks}")
        steps = (f"{name} {value:g}" for name, value in (result.bought or {}).items())
        print(f"choice by choice: {', '.join(steps)}")
    if result.remat is not None:
        print(f"remat: {' '.join(result.remat)}")
    if form is not None:
        drawn = result.timeline if form in sources.PICTURES else result.schedule
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
