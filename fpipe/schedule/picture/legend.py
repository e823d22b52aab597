"""Colours that colour-blind readers tell apart, and the legend that explains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from fpipe.schedule.action import Op
from fpipe.schedule.picture.captions import short
from fpipe.schedule.picture.chart_data import Chart

COLOURS: Final[Mapping[Op, str]] = MappingProxyType(
    {Op.F: "#56b4e9", Op.B: "#d55e00", Op.I: "#f0e442", Op.W: "#009e73"}
)
"""Sky blue, vermilion, yellow and green of Okabe and Ito, "Color Universal Design" (2008).

These four of their colours stay most distinct for the three kinds of colour blindness, when `shade`
lightens them.
"""

OTHER: Final = "#888888"  # any other op
IDLE: Final = "url(#idle)"  # a hatching, so that idle time is no colour of an op
MEMORY_FILL: Final = "#c9cdd3"
MEANING: Final[Mapping[Op, str]] = MappingProxyType(
    {Op.F: "forward", Op.B: "full backward", Op.I: "input gradient", Op.W: "weight gradient"}
)
_LIGHTEST: Final = 0.55  # how far the last stage of a rank is on the way to white


def shade(op: Op, turn: int, turns: int) -> str:
    """The fill of an action: its op's colour, the lighter the later its stage is on the rank.

    Example:
        >>> shade(Op.F, 0, 2), shade(Op.F, 1, 2)
        ('#56b4e9', '#b3ddf5')
    """
    white = _LIGHTEST * turn / (turns - 1) if turns > 1 else 0.0
    colour = COLOURS.get(op, OTHER)
    channels = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(value + (255 - value) * white):02x}" for value in channels)


def ink(fill: str) -> str:
    """Black or white, whichever reads better on `fill` (WCAG 2.1 contrast).

    Example:
        >>> ink("#0072b2"), ink("#f0e442")
        ('#fff', '#000')
    """
    return "#fff" if 1.05 / (luminance(fill) + 0.05) > 4.5 else "#000"


def luminance(colour: str) -> float:
    """Relative luminance of a colour such as "#0072b2", from 0 (black) to 1, as WCAG 2.1 has it."""
    channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


FONT: Final = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
LETTER: Final = 5.8  # a generous width of a letter in 11 pixels
CAPITAL: Final = 2.0  # by which a capital is wider
_GAP: Final = 16.0
_MARGIN: Final = 12.0
_LINE: Final = 20.0


class Entry(NamedTuple):
    """An entry of the legend: its text, and the swatches before it."""

    text: str
    fills: tuple[str, ...]

    @property
    def width(self) -> float:
        capitals = sum(map(str.isupper, self.text[1:]))  # of the ops that are spelt out
        return 14.0 * len(self.fills) + 5 + len(self.text) * LETTER + capitals * CAPITAL


def entries(charts: Sequence[Chart], *, links: bool = True) -> list[Entry]:
    """The entries of a legend: every op that occurs, with its shades; idle time; memory; links."""
    ops = {box.action.op for chart in charts for row in chart.rows for box in row}
    turns = max(len(chart.stages_of(rank)) for chart in charts for rank in range(len(chart.rows)))
    ops_shown = [
        Entry(f"{op} {MEANING[op]}", tuple(shade(op, turn, turns) for turn in range(turns)))
        for op in COLOURS
        if op in ops
    ]
    if turns > 1:
        ops_shown.append(Entry("(lighter: a later stage of the rank)", ()))
    if others := sorted(op for op in ops if op not in COLOURS):
        ops_shown.append(Entry(", ".join(others), (OTHER,)))
    first, *more = _amounts(charts)
    carry = links and any(chart.carried for chart in charts)
    return [
        *ops_shown,
        Entry("idle", (IDLE,)),
        Entry(f"activations held, 0 to {first}", (MEMORY_FILL,)),
        *(Entry(f"or 0 to {amounts}", ()) for amounts in more),
        *([Entry("below: messages on links", ())] if carry else []),
    ]


def _amounts(charts: Sequence[Chart]) -> list[str]:
    """The peak of each chart, with its unit where units differ."""
    units = {True: "microbatches", False: "in the unit of its cost"}
    texts = []
    for counts, unit in units.items():
        alike = [chart for chart in charts if chart.counts_microbatches == counts]
        tops = sorted({max(chart.peaks, default=0.0) for chart in alike})
        if alike:
            mixed = len(alike) < len(charts)
            texts.append(" or ".join(map(short, tops)) + (f" {unit}" if mixed else ""))
    return texts


def legend(charts: Sequence[Chart], width: float, *, links: bool) -> tuple[list[str], float]:
    """The legend, wrapped to `width` pixels, and its height in pixels; `links` are drawn."""
    elements: list[str] = []
    x, y = _MARGIN, 10.0
    for entry in entries(charts, links=links):
        if x > _MARGIN and x + entry.width > width:
            x, y = _MARGIN, y + _LINE
        start = x
        for fill in entry.fills:
            elements.append(f'<rect x="{x:g}" y="{y:g}" width="13" height="12" fill="{fill}"/>')
            x += 14
        elements.append(f'<text x="{x + 4:g}" y="{y + 10:g}">{entry.text}</text>')
        x = round(start + entry.width + _GAP, 1)
    return elements, y + _LINE
