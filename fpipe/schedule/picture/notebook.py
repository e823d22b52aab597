"""Charts as they show themselves in a notebook: no wider than its page, however long they are.

What is long is broken into bands of time; what is huge shows the shares of ops in columns of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Final
from zlib import crc32

from fpipe.schedule.picture.chart import Chart
from fpipe.schedule.picture.coordinates import LEFT, RIGHT
from fpipe.schedule.picture.svg import natural_width, svg

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
