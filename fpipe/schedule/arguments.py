"""Integers, counts, numbers and sequences of callers, as Python's own types."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Set
from numbers import Integral, Real
from typing import Any, TypeGuard

from fpipe.errors import ScheduleError, a_type


def plain_integer(value: object) -> int | None:
    """An integer of any type, such as numpy's, as an int; None for anything else.

    A subclass of int, such as bool, stays as it is.

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


def plain_count(value: object) -> int | None:
    """An integer of any type that is 1 or more, as an int; None for anything else, or a bool.

    Example:
        >>> plain_count(3), plain_count(0), plain_count(True)
        (3, None, None)
    """
    plain = plain_integer(value)
    return None if plain is None or isinstance(plain, bool) or plain < 1 else plain


def plain_counts(**counts: int | None) -> tuple[int, ...]:
    """The counts as Python's own integers, in their order; the keyword is the name to report.

    Raises:
        ScheduleError: one is not an integer, is a bool, or is less than 1.

    Example:
        >>> plain_counts(ranks=4, microbatches=8)
        (4, 8)
    """
    checked = []
    for name, count in counts.items():
        plain = plain_count(count)
        if plain is None:
            raise ScheduleError(f"{name}={count!r:.60} must be an integer, 1 or more")
        checked.append(plain)
    return tuple(checked)


def plain_number(value: object) -> float | None:
    """A real number of any type, such as numpy's, as an int or a float; None for anything else.

    Example:
        >>> from fractions import Fraction
        >>> plain_number(3), plain_number(Fraction(1, 2)), plain_number("3")
        (3, 0.5, None)
    """
    if not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]
    return int(value) if isinstance(value, Integral) else number


def is_several(value: object) -> TypeGuard[Iterable[Any]]:
    """Whether a value is iterable; a 0-dimensional array has ``__iter__`` and is not."""
    try:
        iter(value)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def check_ordered(name: str, values: object, of: str, otherwise: str) -> None:
    """Raise a `ScheduleError` if `values` is a mapping or a set, which has no useful order.

    Args:
        name: of the argument, for the error.
        values: one for each `of`.
        of: ``"stage"``, ``"rank"`` or ``"microbatch"``.
        otherwise: the alternative to a sequence, for the error.
    """
    if isinstance(values, Mapping | Set):
        raise ScheduleError(
            f"{name}={values!r:.60} is {a_type(values)}, which has no order: "
            f"give a sequence with one value per {of}, or {otherwise}"
        )
