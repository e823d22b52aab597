"""Numbers and times as short text, for every form of picture and table."""

from __future__ import annotations

import math
import re
from html import escape
from typing import Final


def ticks(length: float, about: int) -> list[float]:
    """Round times from 0 to `length`, some `about` of them, 1, 2 or 5 times a power of ten apart.

    Example:
        >>> ticks(57, 6)
        [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    """
    if length <= 0:
        return [0.0]
    rough = length / max(about, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    return [number * step for number in range(int(length / step * (1 + 1e-9)) + 1)]


def short(value: float) -> str:
    """A number in four digits, with a prefix of the SI where it is large.

    Example:
        >>> short(4), short(16.5), short(1 / 3), short(2.5e9), short(7e30)
        ('4', '16.5', '0.3333', '2.5G', '7e+30')
    """
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if limit <= abs(value) < 1e15:
            return f"{value / (1e3 if prefix == 'k' else limit):.4g}{prefix}"
    return f"{value:.4g}"


def timed(time: float, unit: str) -> str:
    """A time in four digits, in the unit in which it reads well.

    Example:
        >>> timed(0.00112158, "s"), timed(57, "")
        ('1.122 ms', '57')
    """
    factor, unit = readable_unit(time, unit)
    return f"{short(time * factor)} {unit}".rstrip()


def readable_unit(length: float, unit: str) -> tuple[float, str]:
    """The factor and the unit that make times up to `length` read well.

    Seconds become ms or µs where they are short; any other unit stays as it is.

    Example:
        >>> readable_unit(0.0125, "s"), readable_unit(57, "")
        ((1000.0, 'ms'), (1.0, ''))
    """
    if unit == "s" and length < 1:
        return (1e3, "ms") if length >= 1e-3 else (1e6, "µs")
    return 1.0, unit


# Characters that XML 1.0 forbids, escaped or not: a viewer would refuse the whole file.
_NO_CHARACTER: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def marked_up(text: str) -> str:
    """Text escaped for SVG and HTML, with U+FFFD for characters that XML forbids.

    Example:
        >>> marked_up("a < b")
        'a &lt; b'
    """
    return escape(_NO_CHARACTER.sub("\ufffd", text))
