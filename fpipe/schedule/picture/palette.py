"""Colours that colour-blind readers tell apart: an op has a hue, a stage of the rank a shade."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from fpipe.schedule.action import Op

COLOURS: Final[Mapping[Op, str]] = MappingProxyType(
    {Op.F: "#56b4e9", Op.B: "#d55e00", Op.I: "#f0e442", Op.W: "#009e73"}
)
"""Sky blue, vermilion, yellow and green of Okabe and Ito, "Color Universal Design" (2008).

Of all fours of their colours this one keeps its distances best, for the three kinds of colour
blindness, when the colours are lightened as `shade` does.
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

    Args:
        op: what it does.
        turn: the place of its stage among those of the rank, from 0.
        turns: how many stages the rank has.

    Example:
        >>> shade(Op.F, 0, 2), shade(Op.F, 1, 2)
        ('#56b4e9', '#b3ddf5')
    """
    white = _LIGHTEST * turn / (turns - 1) if turns > 1 else 0.0
    colour = COLOURS.get(op, OTHER)
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def ink(fill: str) -> str:
    """Black or white, whichever reads better on `fill` (WCAG 2.1 contrast).

    Example:
        >>> ink("#0072b2"), ink("#f0e442")
        ('#fff', '#000')
    """
    return "#fff" if 1.05 / (luminance(fill) + 0.05) > 4.5 else "#000"


def luminance(colour: str) -> float:
    """Relative luminance of a colour such as "#0072b2", from 0 (black) to 1, as WCAG 2.1 has it."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
