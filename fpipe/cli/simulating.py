"""`fpipe simulate`: when every action of a schedule runs, and what the step waits for."""

from __future__ import annotations

import argparse
import shutil
from typing import Any, Final

from fpipe.cli import sources
from fpipe.cli.parsing import Commands, add_cost, cost_of, new
from fpipe.errors import ScheduleError
from fpipe.schedule.simulator import simulate
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
  critical path  the actions that the last end waited for"""


def add(commands: Commands[Any]) -> None:
    """Add the command."""
    parser = new(
        commands,
        "simulate",
        "simulate a schedule: print its timeline, or write it as a picture",
        "fpipe simulate zb_h1 --ranks 4 --microbatches 8 --cost 10,12,8 --comm 1 --html zb.html"
        f"\n\n{LEGEND}\n\n{sources.FAMILIES}",
    )
    parser.add_argument("schedule", metavar="SCHEDULE", help=sources.HELP)
    sources.add_size(parser)
    add_cost(parser)
    sources.add_outputs(parser, sources.PICTURES)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    cost = cost_of(options)
    timeline = simulate(sources.schedule_of(options.schedule, sources.size_of(options), cost), cost)
    if not sources.write_outputs(options, sources.PICTURES, timeline):
        print(report(timeline, shutil.get_terminal_size().columns))


def report(timeline: Timeline, width: int, *, bounded: bool = True) -> str:
    """The timeline to scale, its figures, and what the step waited for.

    Args:
        timeline: of a schedule.
        width: in characters.
        bounded: tell the bound of its placement and peaks, and how far it is above.
    """
    width = max(width, 60)
    facts = [
        f"makespan {timeline.makespan:g}",
        f"span {timeline.span:g}",
        f"bubble {min(timeline.bubble):g}",
        f"peak {max(timeline.peak):g}",
    ]
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
