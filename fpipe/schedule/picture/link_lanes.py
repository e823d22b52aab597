"""The lanes of links in an SVG picture, beneath those of the ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from fpipe.schedule.picture.chart_data import Chart
from fpipe.schedule.picture.coordinates import Scale, px
from fpipe.schedule.picture.legend import ink, shade

_HEIGHT: Final = 10.0
_GAP: Final = 3.0  # between two, and beneath the last


def depth(chart: Chart) -> float:
    """The height of all links of a chart, in pixels."""
    return len(chart.links) * (_HEIGHT + _GAP) + (_GAP if chart.links else 0)


def link_lane(chart: Chart, number: int, scale: Scale) -> Iterator[str]:
    """A link: its name, how busy it is, and its messages in the colours of their makers."""
    lane, end, high = chart.links[number], chart.makespan, _HEIGHT * scale.size
    y = scale.y(len(chart.rows), number * (_HEIGHT + _GAP))
    left, right = scale.x(0), scale.x(end)
    base = px(y + (_HEIGHT - 1.5) * scale.size)
    busy = sum(message.end - message.start for message in lane.messages) / end
    labels = [(left - 8 * scale.size, "end", lane.name)]
    if not scale.start:
        labels.append((right + 8 * scale.size, "start", f"busy {busy:.0%}"))
    for x, anchor, text in labels:
        yield (
            f'<text x="{px(x)}" y="{base}" text-anchor="{anchor}" font-size=".82em" '
            f'fill="#555">{text}</text>'
        )
    yield (
        f'<rect x="{px(left)}" y="{px(y)}" width="{px(right - left)}" '
        f'height="{px(high)}" fill="#f4f4f4"/>'
    )
    paths: defaultdict[str, list[str]] = defaultdict(list)
    numbers: defaultdict[str, list[str]] = defaultdict(list)
    digits, size = len(str(chart.microbatches - 1)), 8 * scale.size
    for message in lane.messages:
        if not scale.shows(message.start, message.end):
            continue
        turns = len(chart.stages_of(message.source))
        fill = shade(message.action.op, chart.rows[message.source][message.at].turn, turns)
        x = scale.x(message.start)
        wide = scale.x(message.end) - x
        drawn = max(wide - min(0.8, 0.12 * wide), 0.5)
        h, v = px(drawn), px(high)
        paths[fill].append(f"M{px(x)} {px(y)}h{h}v{v}h-{h}z")
        if digits * size * 0.6 <= drawn:
            middle, line = px(x + drawn / 2), px(y + high / 2 + 0.36 * size)
            numbers[ink(fill)].append(
                f'<text x="{middle}" y="{line}">{message.action.microbatch}</text>'
            )
    for fill, path in paths.items():
        yield f'<path fill="{fill}" d="{"".join(path)}"/>'
    for colour, texts in numbers.items():
        yield f'<g fill="{colour}" font-size="{size:g}" text-anchor="middle">{"".join(texts)}</g>'
