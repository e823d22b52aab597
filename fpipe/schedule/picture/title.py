"""The title of a chart as lines of SVG, as many as the width needs."""

from __future__ import annotations

from typing import Final
from unicodedata import east_asian_width

from fpipe.schedule.picture.chart import Chart
from fpipe.schedule.picture.labels import BETWEEN, facts, marked_up
from fpipe.schedule.picture.legend import CAPITAL, LETTER

LINE: Final = 15.0
_BOLD: Final = 1.35  # by which the name is wider than other text: it is bigger, and bold
_GAP: Final = 10.0  # between name and facts
_WIDE: Final = 11.0  # a letter that takes a square


def title(chart: Chart, room: float) -> list[list[str]]:
    """The name and the facts of a chart, in lines that `room` pixels at type of 11 hold.

    Returns:
        Per line, what of the name and what of the facts is on it, as tspans.
    """
    name = broken([chart.name], room / _BOLD, "")
    told = broken(facts(chart).split(BETWEEN), room, BETWEEN)
    bold = [
        f'<tspan font-weight="bold" font-size="1.2em">{marked_up(line)}</tspan>' for line in name
    ]
    if len(told) == 1 and width(name[-1]) * _BOLD + _GAP + width(told[0]) <= room:
        plain = f'<tspan dx="10" fill="#555">{marked_up(told[0])}</tspan>'
        return [*([line] for line in bold[:-1]), [bold[-1], plain]]
    return [
        *([line] for line in bold),
        *([f'<tspan fill="#555">{marked_up(line)}</tspan>'] for line in told),
    ]


def broken(parts: list[str], room: float, between: str) -> list[str]:
    """Text in lines of at most `room` pixels, broken between parts, else words, else letters.

    Example:
        >>> broken(["4 ranks, 8 stages", "recorded", "as it was"], 120, " · ")
        ['4 ranks, 8 stages', 'recorded · as it was']
    """
    lines: list[str] = []
    for part in parts:
        if lines and width(lines[-1] + between + part) <= room:
            lines[-1] += between + part
            continue
        lines.append("")
        for word in part.split(" "):
            joined = f"{lines[-1]} {word}" if lines[-1] else word
            if width(joined) <= room:
                lines[-1] = joined
                continue
            if lines[-1]:
                lines.append("")
            for letter in word:
                if lines[-1] and width(lines[-1] + letter) > room:
                    lines.append("")
                lines[-1] += letter
    return lines


def width(text: str) -> float:
    """A generous width of text, in pixels at type of 11."""
    wide = sum(east_asian_width(letter) in "WF" for letter in text)
    return len(text) * LETTER + sum(map(str.isupper, text)) * CAPITAL + wide * (_WIDE - LETTER)
