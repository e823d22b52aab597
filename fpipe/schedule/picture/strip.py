"""A chart as text: a line per rank, time to scale from left to right, a letter for what it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fpipe.errors import ScheduleError
from fpipe.schedule.action import COMPUTE_OPS
from fpipe.schedule.arguments import plain_integer
from fpipe.schedule.picture.captions import readable_unit, short, ticks
from fpipe.schedule.picture.chart_data import Box, Chart, fillings

NARROWEST: Final = 50
WIDEST: Final = 1_000_000
IDLE: Final = "."


def strip(chart: Chart, *, width: int = 80) -> str:
    """Draw a chart to scale, in lines of at most `width` characters.

    A column is an equal part of the makespan and shows what the rank does for most of it: F, B, I
    or W, in small letters for the later stages of the rank; "-" for another op, "." for nothing.

    Raises:
        ScheduleError: `width` is less than 50.

    Example:
        >>> from fpipe.schedule.families.single_stage import one_f_one_b
        >>> from fpipe.schedule.picture.chart_data import unit_chart
        >>> print(strip(unit_chart(one_f_one_b(ranks=2, microbatches=3), "1f1b"), width=60))
        time    0            5            10
        rank 0  FFFFF.....BBBBBBFFBBBBB...BBBBB  idle 25.0 %  peak 2
        rank 1  ...FFBBBBBFFFBBBBBFFFBBBBB.....  idle 25.0 %  peak 1
    """
    room = plain_integer(width)
    if room is None or not NARROWEST <= room < WIDEST:
        raise ScheduleError(
            f"width={width!r:.60} must be {NARROWEST} characters or more, and less than {WIDEST}"
        )
    factor, unit = readable_unit(chart.makespan, chart.unit)
    labels = ["time", *(f"rank {rank}" for rank in range(len(chart.rows)))]
    facts = [f"({unit})" if unit else ""]
    for rank, peak in enumerate(chart.peaks):
        facts.append(f"idle {100 * chart.idle[rank]:4.1f} %  peak {short(peak)}")
    margin, right = max(map(len, labels)), max(map(len, facts))
    columns = room - margin - right - 4
    lines = [_axis(chart.makespan * factor, columns)]
    for row in chart.rows:
        span = chart.makespan / columns
        lines.append("".join(_most(fill, span) for fill in fillings(row, span, columns, _letter)))
    return "\n".join(
        f"{label:{margin}}  {line:{columns}}  {fact}".rstrip()
        for label, line, fact in zip(labels, lines, facts, strict=True)
    )


def _axis(length: float, columns: int) -> str:
    """Round times, each over the column that begins at it."""
    line = ""
    for mark in ticks(length, columns // 8):
        at = round(mark / length * columns) if length else 0
        # Long numbers, as of 1e+100, would run into one another.
        if at + len(short(mark)) <= columns and (at > len(line) or not line):
            line = line.ljust(at) + short(mark)
    return line


def _letter(box: Box) -> str:
    if box.action.op not in COMPUTE_OPS:
        return "-"
    return box.action.op.lower() if box.turn else str(box.action.op)


def _most(fill: Mapping[str, float], span: float) -> str:
    idle = span - sum(fill.values())
    letter, most = max(fill.items(), key=lambda item: item[1], default=(IDLE, 0))
    return letter if most > idle else IDLE
