"""A chart as HTML: one file that needs nothing else, and no wider than a notebook's page.

In a notebook, what is long is broken into bands of time, and what is huge shows the shares of ops
in columns of time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.resources import files
from math import ceil
from typing import Any, Final
from zlib import crc32

from fpipe.schedule.action import Op
from fpipe.schedule.picture.captions import marked_up, readable_unit
from fpipe.schedule.picture.chart_data import Chart, facts, idle, stage_names
from fpipe.schedule.picture.coordinates import LEFT, RIGHT
from fpipe.schedule.picture.legend import MEANING, entries, ink, shade
from fpipe.schedule.picture.svg import natural_width, svg

_BESIDE: Final = 3  # where the script expects the half of a pair


def page(charts: Sequence[Chart]) -> str:
    """Write charts as an interactive page, below each other on one scale of time.

    The page draws on a canvas, so that a schedule of many thousand actions stays quick. Over an
    action it shows start, end and wait; wheel, mouse and keys zoom and move;
    messages and the critical path can be switched on.
    """
    content = {
        "@TITLE@": marked_up(", ".join(chart.name for chart in charts)),
        "@STYLE@": _resource("page.css"),
        "@SCRIPT@": _resource("page.js"),
        # A "</script>" in a name must not end the element early.
        "@DATA@": json.dumps(_data(charts), separators=(",", ":")).replace("<", "\\u003c"),
    }
    # All at once: a name that looks like a mark stays a name.
    return re.sub("|".join(content), lambda mark: content[mark[0]], _resource("page.html"))


def _resource(name: str) -> str:
    return files("fpipe.schedule.picture").joinpath(name).read_text("utf-8")


def _data(charts: Sequence[Chart]) -> dict[str, Any]:
    """The data of the script; ops and styles are numbered, because they occur many times."""
    ops: dict[Op, int] = {}
    styles: dict[str, int] = {}
    return {
        "charts": [_chart(chart, ops, styles) for chart in charts],
        "ops": [{"name": op, "meaning": MEANING.get(op, op)} for op in ops],
        "styles": [{"fill": fill, "ink": ink(fill)} for fill in styles],
        "legend": [{"text": entry.text, "fills": entry.fills} for entry in entries(charts)],
    }


def _chart(chart: Chart, ops: dict[Op, int], styles: dict[str, int]) -> dict[str, Any]:
    factor, unit = readable_unit(chart.makespan, chart.unit)
    ranks = range(len(chart.rows))
    rows = []
    for rank in ranks:
        turns = len(chart.stages_of(rank))
        rows.append(
            [
                [
                    box.action.stage,
                    ops.setdefault(box.action.op, len(ops)),
                    box.action.microbatch,
                    box.start,
                    box.end,
                    styles.setdefault(shade(box.action.op, box.turn, turns), len(styles)),
                    *(box.waited or (None, None)),
                    box.ready,
                    *([_BESIDE] if box.beside else [box.half] if box.half else []),
                ]
                for box in chart.rows[rank]
            ]
        )
    return {
        "name": chart.name,
        "facts": facts(chart),
        "factor": factor,
        "unit": unit,
        "makespan": chart.makespan,
        "rows": rows,
        "memory": chart.memory,
        "links": [
            {
                "name": lane.name,
                "messages": [
                    [each.source, each.at, each.target, each.start, each.end]
                    for each in lane.messages
                ],
            }
            for lane in chart.links
        ],
        "messages": [[*message.source, *message.target] for message in chart.messages],
        "peaks": chart.peaks,
        "idle": [idle(chart, rank) for rank in ranks],
        "stages": [stage_names(chart, rank) for rank in ranks],
    }


BAND: Final = 900.0
"""Pixels of the lanes in a band: on the page of a notebook its text is large enough."""

MOST_LANES: Final = 48
"""Lanes of ranks in all bands together, about two screens."""

BOXES: Final = 40
"""Boxes of a rank that a band has room for, even where some take much longer than others."""

LARGEST: Final = 20_000
"""Boxes in a picture, about two megabytes; of more actions, columns of time are drawn."""

FEWEST_COLUMNS: Final = 100


def figure(charts: Sequence[Chart]) -> str:
    """A picture of charts as HTML, no wider than a page: what is long is broken into bands."""
    lanes = natural_width(charts)
    columns, ranks = 0, sum(len(chart.rows) for chart in charts)
    longest = max((len(row) for chart in charts for row in chart.rows), default=0)
    most = min(max(MOST_LANES // max(ranks, 1), 1), ceil(longest / BOXES) or 1)
    bands = min(ceil(lanes / BAND), most) if lanes > 1.3 * BAND else 1
    if sum(len(row) for chart in charts for row in chart.rows) > LARGEST:
        each = max(LARGEST // max(3 * ranks, 1), FEWEST_COLUMNS)
        bands = min(max(int(each / BAND), 1), most)
        columns = min(each, int(BAND))
    width = BAND + LEFT + RIGHT if lanes > 1.3 * BAND else None
    drawn = svg(charts, width=width, bands=bands, columns=columns)
    # The pattern of idle time is found by its name, in the whole page.
    name = f"idle-{crc32(drawn.encode()):08x}"
    drawn = drawn.replace('id="idle"', f'id="{name}"', 1).replace("url(#idle)", f"url(#{name})")
    return drawn.replace('style="max-width:100%"', 'style="max-width:100%;height:auto"', 1)
