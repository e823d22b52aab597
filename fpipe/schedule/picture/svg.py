"""A chart as SVG: a lane per rank with its bubbles, its memory beneath, a legend above, the time.

A long one may be broken into bands of equal time, below each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from math import inf
from statistics import quantiles
from typing import Final
from unicodedata import east_asian_width

from fpipe.errors import ScheduleError
from fpipe.schedule.arguments import plain_number
from fpipe.schedule.picture.captions import marked_up, readable_unit, short, ticks
from fpipe.schedule.picture.chart_data import (
    BETWEEN,
    Box,
    Chart,
    described,
    facts,
    fillings,
    idle,
    stage_names,
)
from fpipe.schedule.picture.coordinates import GAP, LANE, LEFT, MEMORY, RIGHT, Scale, px
from fpipe.schedule.picture.legend import (
    CAPITAL,
    COLOURS,
    FONT,
    IDLE,
    LETTER,
    MEMORY_FILL,
    OTHER,
    ink,
    legend,
    shade,
)
from fpipe.schedule.picture.link_lanes import depth, link_lane
from fpipe.schedule.simulation.events import Steps

BOX: Final = 14.0  # how wide an ordinary box is where there is room: two digits fit
NARROWEST, WIDEST = 420.0, 3200.0  # of the lanes
# These grow with the width, so that the labels of a wide picture can be read when it is fitted in.
ROOMY, GROWTH = 1400.0, 1.8
HEAD: Final = 26.0  # a chart's title
FOOT: Final = 34.0  # its axis
EDGE: Final = 8.0  # free at the end of a title


def svg(
    charts: Sequence[Chart], *, width: float | None = None, bands: int = 1, columns: int = 0
) -> str:
    """Draw charts below each other, on one scale of time.

    Each rank is a lane of boxes, coloured by op and lighter for the later stages of the rank, with
    the number of the microbatch where it fits. Idle time is hatched. Beneath a lane is the memory
    of the rank over time, on the same scale for all ranks of a chart. Beneath all ranks of a
    picture of boxes is a thin lane for each link that takes time to carry messages, in the colours
    of their makers.

    Without a width it is as wide as the boxes need to be numbered, within limits. Bands are parts
    of the time, of equal length, below each other. With `columns`, the shares of the ops in each of
    so many columns of a band are drawn, and no boxes.

    Raises:
        ScheduleError: `width` leaves no room for the lanes, or is not a number.
    """
    length = max(chart.makespan for chart in charts)
    lanes = min(max(natural_width(charts), NARROWEST), WIDEST)
    if width is not None:
        lanes = (plain_number(width) or 0) - LEFT - RIGHT
    if not 50 <= lanes < 1e6:
        raise ScheduleError(
            f"width={width!r} must be at least {LEFT + RIGHT + 50:g} pixels, {LEFT + RIGHT:g} of "
            "which are labels, and less than a million"
        )
    size = 1.0
    if width is None:
        size = min(max(lanes / ROOMY, 1.0), GROWTH)
    body: list[str] = []
    key, above = legend(charts, LEFT + lanes / size + RIGHT, links=not columns)
    y = above * size
    for chart in charts:
        lines = title_lines(chart, lanes / size + RIGHT - EDGE)
        top = y + (HEAD + LINE * (len(lines) - 1)) * size
        span = length / bands
        scale = Scale(lanes / span if length else 1.0, lanes, top, size)
        body += _title(lines, scale)
        for band in range(bands):
            if band and band * span >= chart.makespan:
                break
            end = inf if band == bands - 1 else (band + 1) * span
            scale = scale._replace(top=top, start=band * span, end=end)
            body += _chart(chart, scale, span / columns if columns else 0)
            y = scale.y(len(chart.rows), (0 if columns else depth(chart)) + FOOT)
            top = y + GAP * size
    wide, tall = px((LEFT + RIGHT) * size + lanes), px(y)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{tall}" '
            f'viewBox="0 0 {wide} {tall}" font-family="{FONT}" font-size="{px(11 * size)}" '
            'style="max-width:100%" preserveAspectRatio="xMinYMin" role="img" '
            f'aria-label="{marked_up(" ".join(map(described, charts)))}">',
            f"<title>{marked_up(', '.join(chart.name for chart in charts))}</title>",
            '<defs><pattern id="idle" width="5" height="5" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="5" height="5" fill="#f4f4f4"/>'
            '<rect width="1.2" height="5" fill="#d4d4d4"/></pattern></defs>',
            f'<rect width="{wide}" height="{tall}" fill="#fff"/>',
            f'<g transform="scale({px(size)})" font-size="11">',
            *key,
            "</g>",
            *body,
            "</svg>\n",
        ]
    )


def natural_width(charts: Sequence[Chart]) -> float:
    """The width of lanes in which an ordinary box, of the shortest tenth, has room for a number."""
    length = max(chart.makespan for chart in charts)
    lengths = [box.end - box.start for chart in charts for row in chart.rows for box in row]
    lengths = [value for value in lengths if value > 0]
    if not lengths:
        return NARROWEST
    usual = quantiles(lengths, n=10)[0] if len(lengths) > 1 else lengths[0]
    return round(length / max(usual, length * 1e-9) * BOX, 1)


def _title(lines: Sequence[Sequence[str]], scale: Scale) -> Iterator[str]:
    """A chart's title, above its lanes."""
    for at, line in enumerate(lines, 1 - len(lines)):
        y = px(scale.y(0, LINE * at - 10))
        yield f'<text x="{px(scale.x(0))}" y="{y}">{"".join(line)}</text>'


def _chart(chart: Chart, scale: Scale, column: float) -> Iterator[str]:
    """A chart's axis and its lanes, of boxes or of columns of so much time."""
    factor, unit = readable_unit(chart.makespan, chart.unit)
    ranks = len(chart.rows)
    about = int(chart.makespan * scale.pixels / (90 * scale.size))
    marks = [
        mark
        for mark in ticks(chart.makespan * factor, max(2, about))
        if scale.start <= mark / factor < scale.end
    ]
    xs = [px(scale.x(mark / factor)) for mark in marks]
    deep = (0 if column else depth(chart)) - GAP
    top, bottom = scale.y(0, -3), scale.y(ranks, 4 + deep)
    base = px(scale.y(ranks, 16 + deep))
    lines = "".join(f"M{x} {px(top)}V{px(bottom)}" for x in xs)
    yield f'<path d="{lines}" stroke="#e4e4e4"/>'
    yield '<g text-anchor="middle" fill="#555">'
    for x, mark in zip(xs, marks, strict=True):
        yield f'<text x="{x}" y="{base}">{short(mark)}</text>'
    yield "</g>"
    # Behind the last number, which is centred on its time.
    behind = 0.0
    if marks:
        behind = scale.x(marks[-1] / factor) + (3.5 * len(short(marks[-1])) + 4) * scale.size
    right = px(max(scale.x(chart.makespan) + 8 * scale.size, behind))
    named = marked_up(f"time ({unit})") if unit else "time"
    yield f'<text x="{right}" y="{base}" fill="#555">{named}</text>'
    for rank in range(ranks):
        yield from _rank(chart, rank, scale, column)
    if column:
        yield from _columns(chart, scale, column)
        return
    yield from _boxes(chart, scale)
    for number in range(len(chart.links)):
        yield from link_lane(chart, number, scale)


def _rank(chart: Chart, rank: int, scale: Scale, column: float) -> Iterator[str]:
    """A rank's labels, its idle background and its memory."""
    end, zero = chart.makespan, scale.y(rank, LANE + MEMORY)
    middle, beneath = (
        px(scale.y(rank, LANE / 2 + 4)),
        px(scale.y(rank, LANE + MEMORY - 3)),
    )
    left, right = px(scale.x(0) - 8 * scale.size), px(scale.x(end) + 8 * scale.size)
    yield f'<text x="{left}" y="{middle}" text-anchor="end">rank {rank}</text>'
    if stages := stage_names(chart, rank):
        yield (
            f'<text x="{left}" y="{beneath}" text-anchor="end" font-size=".82em" fill="#555">'
            f"{stages}</text>"
        )
    if not scale.start:
        yield f'<text x="{right}" y="{middle}">{idle(chart, rank)}</text>'
        yield (
            f'<text x="{right}" y="{beneath}" font-size=".82em" fill="#555">'
            f"peak {short(chart.peaks[rank])}</text>"
        )
    wide = px(scale.x(end) - scale.x(0))
    yield (
        f'<rect x="{px(scale.x(0))}" y="{px(scale.y(rank))}" width="{wide}" '
        f'height="{px(LANE * scale.size)}" fill="{IDLE}"/>'
    )
    most = max(chart.peaks, default=0.0)
    if most > 0:
        # A step per change; the last amount, usually none, holds to the end.
        path = [f"M{px(scale.x(0))} {px(zero)}"]
        for time, amount, until in _amounts(chart.memory[rank], end, scale, column):
            if until > time:
                level = zero - (MEMORY - 2) * scale.size * max(amount, 0.0) / most
                path.append(f"H{px(scale.x(time))}V{px(level)}H{px(scale.x(until))}")
        yield f'<path d="{"".join(path)}V{px(zero)}z" fill="{MEMORY_FILL}"/>'
    yield f'<path d="M{px(scale.x(0))} {px(zero)}H{px(scale.x(end))}" stroke="#999"/>'


def _amounts(
    steps: Steps, end: float, scale: Scale, column: float
) -> Iterator[tuple[float, float, float]]:
    """From when, how much and until when a rank holds, in the time that the scale shows.

    In columns of time, the most of each.
    """
    last, most = -1, 0.0
    for (time, amount), (until, _) in pairwise([*steps, (end, 0.0)]):
        if not scale.shows(time, until):
            continue
        if not column:
            yield time, amount, until
            continue
        number = int((max(time, scale.start) - scale.start) / column)
        if number > last:
            if last >= 0:
                yield scale.start + last * column, most, scale.start + number * column
            last, most = number, 0.0
        most = max(most, amount)
    if last >= 0:
        yield scale.start + last * column, most, min(scale.end, end)


def _boxes(chart: Chart, scale: Scale) -> Iterator[str]:
    """The boxes, one path for all of a colour, and their numbers, one group for all of a style.

    Collectives that run beside a rank are thin, between its lane and its memory.
    """
    paths: defaultdict[str, list[str]] = defaultdict(list)
    collectives: defaultdict[str, list[str]] = defaultdict(list)
    numbers: defaultdict[tuple[str, float], list[str]] = defaultdict(list)
    digits, tall = len(str(chart.microbatches - 1)), LANE * scale.size
    for rank, row in enumerate(chart.rows):
        turns, y = len(chart.stages_of(rank)), scale.y(rank)
        for box in row:
            if not scale.shows(box.start, box.end):
                continue
            fill = shade(box.action.op, box.turn, turns)
            wide = scale.x(box.end) - scale.x(box.start)
            # A hairline of the background keeps neighbours apart.
            drawn = max(wide - min(0.8, 0.12 * wide), 0.5)
            x = scale.x(box.start)
            if box.beside:
                under, thick = scale.y(rank, LANE + 1), 5 * scale.size
                band = f"M{px(x)} {px(under)}h{px(drawn)}v{px(thick)}h-{px(drawn)}z"
                collectives[fill].append(band)
                continue
            # Two that run together share the height of the lane.
            high = tall / 2 if box.half else tall
            top = y + high if box.half == 2 else y
            paths[fill].append(f"M{px(x)} {px(top)}h{px(drawn)}v{px(high)}h-{px(drawn)}z")
            if size := _size(box, drawn, digits, scale.size):
                middle, base = px(x + drawn / 2), px(top + high / 2 + 0.36 * size)
                numbers[ink(fill), size].append(
                    f'<text x="{middle}" y="{base}">{box.action.microbatch}</text>'
                )
    for fill, path in (*paths.items(), *collectives.items()):
        yield f'<path fill="{fill}" d="{"".join(path)}"/>'
    for (colour, size), texts in numbers.items():
        yield f'<g fill="{colour}" font-size="{size:g}" text-anchor="middle">{"".join(texts)}</g>'


def _columns(chart: Chart, scale: Scale, span: float) -> Iterator[str]:
    """The share of each op in each column of `span` time, one path for all of a colour."""
    paths: defaultdict[str, list[str]] = defaultdict(list)
    end = min(scale.end, chart.makespan)
    number, ops = max(round((end - scale.start) / span), 1), [*COLOURS]
    for rank, row in enumerate(chart.rows):
        turns, top = len(chart.stages_of(rank)), scale.y(rank)

        def place(box: Box) -> tuple[int, int]:
            op = box.action.op
            return ops.index(op) if op in ops else len(ops), box.turn

        fills = fillings(row, span, number, place, scale.start)
        stacks = [tuple((k, round(LANE * fill[k] / span)) for k in sorted(fill)) for fill in fills]
        at = 0
        for stack, alike in groupby(stacks):
            many, y = sum(1 for _ in alike), top
            x, wide = scale.x(scale.start + at * span), many * span * scale.pixels
            for (op, turn), share in stack:
                tall = share * scale.size
                fill = shade(ops[op], turn, turns) if op < len(ops) else OTHER
                paths[fill].append(f"M{px(x)} {px(y)}h{px(wide)}v{px(tall)}h-{px(wide)}z")
                y += tall
            at += many
    for fill, path in paths.items():
        yield f'<path fill="{fill}" d="{"".join(path)}"/>'


def _size(box: Box, drawn: float, digits: int, scale: float) -> float:
    """The size of type in which any number of the chart fits into the box; 0 if none does."""
    if box.action.microbatch is None:
        return 0
    sizes = (10 * scale, 10, 9, 8, 7, 6)
    return next((size for size in sizes if digits * size * 0.6 <= drawn), 0)


LINE: Final = 15.0
_BOLD: Final = 1.35  # by which the name is wider than other text: it is bigger, and bold
_GAP: Final = 10.0  # between name and facts
_WIDE: Final = 11.0  # a letter that takes a square


def title_lines(chart: Chart, room: float) -> list[list[str]]:
    """The tspans of each line of a chart's name and facts, in `room` pixels at type of 11."""
    name = broken_lines([chart.name], room / _BOLD, "")
    lines = broken_lines(facts(chart).split(BETWEEN), room, BETWEEN)
    bold = [
        f'<tspan font-weight="bold" font-size="1.2em">{marked_up(line)}</tspan>' for line in name
    ]
    if len(lines) == 1 and text_width(name[-1]) * _BOLD + _GAP + text_width(lines[0]) <= room:
        plain = f'<tspan dx="10" fill="#555">{marked_up(lines[0])}</tspan>'
        return [*([line] for line in bold[:-1]), [bold[-1], plain]]
    return [
        *([line] for line in bold),
        *([f'<tspan fill="#555">{marked_up(line)}</tspan>'] for line in lines),
    ]


def broken_lines(texts: list[str], room: float, between: str) -> list[str]:
    """Text in lines of at most `room` pixels, broken_lines between parts, else words, else letters.

    Example:
        >>> broken_lines(["4 ranks, 8 stages", "recorded", "as it was"], 120, " · ")
        ['4 ranks, 8 stages', 'recorded · as it was']
    """
    lines: list[str] = []
    for text in texts:
        if lines and text_width(lines[-1] + between + text) <= room:
            lines[-1] += between + text
            continue
        lines.append("")
        for word in text.split(" "):
            joined = f"{lines[-1]} {word}" if lines[-1] else word
            if text_width(joined) <= room:
                lines[-1] = joined
                continue
            if lines[-1]:
                lines.append("")
            for letter in word:
                if lines[-1] and text_width(lines[-1] + letter) > room:
                    lines.append("")
                lines[-1] += letter
    return lines


def text_width(text: str) -> float:
    """A generous text_width of text, in pixels at type of 11."""
    wide = sum(east_asian_width(letter) in "WF" for letter in text)
    return len(text) * LETTER + sum(map(str.isupper, text)) * CAPITAL + wide * (_WIDE - LETTER)
