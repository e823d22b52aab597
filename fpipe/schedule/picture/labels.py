"""What is written beside a chart: its title line, its ranks."""

from __future__ import annotations

import re
from html import escape
from typing import Final

from fpipe.schedule.picture.axis import timed
from fpipe.schedule.picture.chart import Chart
from fpipe.schedule.sizes import sizes

# What XML 1.0 has no place for, written in whatever way: a viewer would refuse the whole file.
_NO_CHARACTER: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")

BETWEEN: Final = " · "
"""What stands between two facts."""


def marked_up(text: str) -> str:
    """Text as it stands in SVG and HTML; the sign for it where there is no such character.

    Example:
        >>> marked_up("a < b")
        'a &lt; b'
    """
    return escape(_NO_CHARACTER.sub("\ufffd", text))


def facts(chart: Chart) -> str:
    """The size of a schedule, how long it takes, and what must be known about its times."""
    parts = [
        sizes(len(chart.rows), len(chart.placement), chart.microbatches),
        f"makespan {timed(chart.makespan, chart.unit)}",
        *([chart.note] if chart.note else []),
    ]
    return BETWEEN.join(parts)


def stage_names(chart: Chart, rank: int) -> str:
    """The stages of a rank; nothing where the rank has the stage of its own number alone."""
    stages = chart.stages_of(rank)
    if stages == (rank,):
        return ""
    if not stages:
        return "no stage"
    named = ", ".join(map(str, stages)) if len(stages) < 4 else f"{stages[0]}, {stages[1]}, …"
    return f"{'stage' if len(stages) == 1 else 'stages'} {named}"


def idle(chart: Chart, rank: int) -> str:
    """How much of the time a rank does nothing."""
    return f"idle {100 * chart.idle(rank):.1f} %"
