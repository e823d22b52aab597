"""Integers of any type, as Python's own, and counts among them."""

from __future__ import annotations

import operator

from fpipe.errors import ScheduleError


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


def plain_counts(**counts: int) -> tuple[int, ...]:
    """The counts as Python's own integers, in their order; the keyword is the name to report.

    Raises:
        ScheduleError: one is no integer, a bool or less than 1.

    Example:
        >>> plain_counts(ranks=4, microbatches=8)
        (4, 8)
    """
    found = []
    for name, count in counts.items():
        plain = plain_integer(count)
        if plain is None or isinstance(plain, bool) or plain < 1:
            raise ScheduleError(f"{name}={count!r} must be an integer, 1 or more")
        found.append(plain)
    return tuple(found)
