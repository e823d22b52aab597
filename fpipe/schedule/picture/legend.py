"""What the colours mean, as lines of SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from fpipe.schedule.picture.axis import short
from fpipe.schedule.picture.chart import Chart
from fpipe.schedule.picture.palette import COLOURS, IDLE, MEANING, MEMORY_FILL, OTHER, shade

FONT: Final = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
LETTER: Final = 5.8  # a generous width of a letter in 11 pixels
CAPITAL: Final = 2.0  # by which a capital is wider
_GAP: Final = 16.0
_MARGIN: Final = 12.0
_LINE: Final = 20.0


class Entry(NamedTuple):
    """A line of the legend: what is said, and the swatches before it."""

    text: str
    fills: tuple[str, ...]

    @property
    def width(self) -> float:
        capitals = sum(map(str.isupper, self.text[1:]))  # of the ops that are spelt out
        return 14.0 * len(self.fills) + 5 + len(self.text) * LETTER + capitals * CAPITAL


def entries(charts: Sequence[Chart]) -> list[Entry]:
    """What a reader must know: every op that occurs, with its shades; idle time; memory."""
    ops = {box.action.op for chart in charts for row in chart.rows for box in row}
    turns = max(len(chart.stages_of(rank)) for chart in charts for rank in range(len(chart.rows)))
    found = [
        Entry(f"{op} {MEANING[op]}", tuple(shade(op, turn, turns) for turn in range(turns)))
        for op in COLOURS
        if op in ops
    ]
    if turns > 1:
        found.append(Entry("(lighter: a later stage of the rank)", ()))
    if others := sorted(op for op in ops if op not in COLOURS):
        found.append(Entry(", ".join(others), (OTHER,)))
    first, *more = _amounts(charts)
    return [
        *found,
        Entry("idle", (IDLE,)),
        Entry(f"activations held, 0 to {first}", (MEMORY_FILL,)),
        *(Entry(f"or 0 to {amounts}", ()) for amounts in more),
    ]


def _amounts(charts: Sequence[Chart]) -> list[str]:
    """The most that each chart's memory reaches, with the units where they are not the same."""
    units = {True: "microbatches", False: "in the unit of its cost"}
    told = []
    for counts, unit in units.items():
        own = [chart for chart in charts if chart.counts_microbatches == counts]
        tops = sorted({max(chart.peaks, default=0.0) for chart in own})
        if own:
            mixed = len(own) < len(charts)
            told.append(" or ".join(map(short, tops)) + (f" {unit}" if mixed else ""))
    return told


def legend(charts: Sequence[Chart], width: float) -> tuple[list[str], float]:
    """The legend in as many lines as `width` pixels need, and how high it is, in pixels."""
    parts: list[str] = []
    x, y = _MARGIN, 10.0
    for entry in entries(charts):
        if x > _MARGIN and x + entry.width > width:
            x, y = _MARGIN, y + _LINE
        start = x
        for fill in entry.fills:
            parts.append(f'<rect x="{x:g}" y="{y:g}" width="13" height="12" fill="{fill}"/>')
            x += 14
        parts.append(f'<text x="{x + 4:g}" y="{y + 10:g}">{entry.text}</text>')
        x = round(start + entry.width + _GAP, 1)
    return parts, y + _LINE
