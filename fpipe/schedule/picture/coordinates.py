"""Where things are in an SVG picture: times across, ranks down."""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple

LANE: Final = 20.0
MEMORY: Final = 14.0
GAP: Final = 8.0  # between ranks
LEFT: Final = 84.0
RIGHT: Final = 116.0


class Scale(NamedTuple):
    """Coordinates: `pixels` per unit of time, lanes from `top` down, all else in `size` pixels.

    Times before `start` and after `end` lie at the edges.
    """

    pixels: float
    width: float
    top: float
    size: float
    start: float = 0.0
    end: float = inf

    def x(self, time: float) -> float:
        return LEFT * self.size + (min(max(time, self.start), self.end) - self.start) * self.pixels

    def shows(self, start: float, end: float) -> bool:
        return start < self.end and (end > self.start or start == end == self.start)

    def y(self, rank: int, down: float = 0) -> float:
        return self.top + (rank * (LANE + MEMORY + GAP) + down) * self.size


def px(value: float) -> str:
    """A coordinate, to a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
