"""The colours keep apart for every kind of colour vision, and numbers can be read on them."""

from __future__ import annotations

from itertools import combinations, product
from math import dist

import pytest

from fpipe.schedule.picture.legend import COLOURS, ink, luminance, shade

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision
# Deficiency" (2009): full severity, in linear RGB.
VISION = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def seen(colour: str, vision: str) -> tuple[float, float, float]:
    """A colour in CIE Lab, as an eye of that kind sees it."""
    linear = []
    for at in (1, 3, 5):
        part = int(colour[at : at + 2], 16) / 255
        linear.append(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
    r, g, b = (sum(m * x for m, x in zip(row, linear, strict=True)) for row in VISION[vision])
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883,
    )
    x, y, z = (max(v, 0) ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("turns, least", [(1, 16), (2, 11)])
def test_ops_look_different(vision: str, turns: int, least: float) -> None:
    """2.3 is a just noticeable difference; 11 is plain to see side by side."""
    for one, other in combinations(COLOURS, 2):
        for a, b in product(range(turns), repeat=2):
            first, second = shade(one, a, turns), shade(other, b, turns)
            assert dist(seen(first, vision), seen(second, vision)) > least, (one, a, other, b)


@pytest.mark.parametrize("turns", [1, 2, 3, 4])
def test_numbers_can_be_read(turns: int) -> None:
    for op, turn in product(COLOURS, range(turns)):
        fill = shade(op, turn, turns)
        light, dark = sorted([luminance(fill), 1.0 if ink(fill) == "#fff" else 0.0], reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (op, turn)
