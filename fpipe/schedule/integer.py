"""Integers of any type, as Python's own."""

from __future__ import annotations

import operator


def plain_integer(value: object) -> int | None:
    """An integer of any type, such as numpy's, as an int; None for anything else.

    What is an int of some kind, as a bool is, stays what it is.

    Example:
        >>> plain_integer(3), plain_integer(3.0), plain_integer("3")
        (3, None, None)
    """
    if isinstance(value, int):
        return value
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
