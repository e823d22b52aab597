"""Arguments of callers, checked, as Python's own types: numbers, sequences, and those of a cost."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Set
from numbers import Integral, Real
from typing import Any, TypeAlias, TypeGuard

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


def plain_seed(seed: object) -> int:
    """A seed of random choices, which must be an integer, as an int."""
    plain = plain_integer(seed)
    if plain is None:
        raise ScheduleError(f"seed={seed!r:.60} must be an integer")
    return plain


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
    """Raise a `ScheduleError` if `values`, one for each `of`, are a mapping or a set: these have no
    order."""
    if isinstance(values, Mapping | Set):
        raise ScheduleError(
            f"{name}={values!r:.60} is {a_type(values)}, which has no order: "
            f"give a sequence with one value per {of}, or {otherwise}"
        )


# Between these, sums and ratios of costs neither overflow nor vanish.
LEAST, MOST = 1e-100, 1e100

PerStage: TypeAlias = float | tuple[float, ...]
Latency: TypeAlias = float | tuple[tuple[float, ...], ...]
Shared: TypeAlias = bool | tuple[tuple[int, ...], ...]


def per_stage(name: str, value: float | Iterable[float], *, signed: bool = False) -> PerStage:
    if isinstance(value, str) or not is_several(value):
        return checked_number(name, value, signed)
    check_ordered(f"cost {name}", value, "stage", "one number for all")
    return tuple(checked_number(f"{name}[{k}]", entry, signed) for k, entry in enumerate(value))


def values_of_stages(name: str, value: PerStage, stages: int, ranks: int) -> tuple[float, ...]:
    """A value for each stage, where a number is for a rank's share of the model."""
    if not isinstance(value, tuple):
        return (value if stages == ranks else value * ranks / stages,) * stages
    if len(value) != stages:
        raise ScheduleError(
            f"cost.{name} has {len(value)} values for a placement of {stages} stages: "
            "give one value per stage, or one number for all"
            + (
                f" (cost.merged({len(value) // stages}) makes stages in a row one)"
                if len(value) % stages == 0
                else ""
            )
        )
    return value


def has_any(value: PerStage) -> bool:
    return any(value) if isinstance(value, tuple) else value > 0


def checked_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ScheduleError(f"cost {name}={value!r:.60} must be True or False")
    return value


def checked_pair(pair: object) -> float | None:
    number = None if pair is None else plain_number(pair)
    if pair is not None and (number is None or not 0 < number <= 1):
        raise ScheduleError(f"cost pair={pair!r:.60} must be above 0 and at most 1, or None")
    return number


def _one_per(of: str, name: str, values: Iterable[float]) -> tuple[float, ...]:
    """A number for each rank or microbatch."""
    if not is_several(values):
        raise ScheduleError(f"cost {name}={values!r:.60} must be a sequence, a number per {of}")
    check_ordered(f"cost {name}", values, of, "None where all are alike")
    return tuple(checked_number(f"{name}[{k}]", entry) for k, entry in enumerate(values))


def checked_speed(speed: Iterable[float] | None) -> tuple[float, ...] | None:
    if speed is None:
        return None
    values = _one_per("rank", "speed", speed)
    if not values or not all(values):
        raise ScheduleError(
            f"cost speed={values!r:.60} must have a number above 0 for each rank, or be None"
        )
    return values


def checked_sizes(name: str, sizes: Iterable[float] | None) -> tuple[float, ...] | None:
    if sizes is None:
        return None
    values = _one_per("microbatch", name, sizes)
    if not values:
        raise ScheduleError(f"cost {name}=() must have a number for each microbatch, or be None")
    if not all(values):
        raise ScheduleError(
            f"cost {name}[{values.index(0)}]=0: a microbatch of nothing takes no time; give a size "
            "above 0"
        )
    return values


def values_of_microbatches(
    name: str, values: tuple[float, ...] | None, microbatches: int
) -> tuple[float, ...]:
    """A size for each microbatch; 1 where there is none."""
    if values is None:
        return (1,) * microbatches
    if len(values) != microbatches:
        raise ScheduleError(
            f"cost.{name} has {len(values)} values for {microbatches} microbatches: give "
            "one for each, or None where all are alike"
        )
    return values


def by_pair(name: str, value: float | Iterable[Iterable[float]], what: str) -> Latency:
    if not is_several(value):
        return checked_number(name, value)
    rows = [tuple(row) if is_several(row) else () for row in value]
    if not rows or any(len(row) != len(rows) for row in rows):
        raise ScheduleError(
            f"{name}={value!r:.60} must be a number, or a square table with {name}[a][b] the "
            f"{what} from rank a to rank b"
        )
    return tuple(
        tuple(checked_number(f"{name}[{a}][{b}]", entry) for b, entry in enumerate(row))
        for a, row in enumerate(rows)
    )


def checked_shared(shared: bool | Iterable[Iterable[int]]) -> Shared:
    if isinstance(shared, bool):
        return shared
    rows = [tuple(row) if is_several(row) else () for row in shared] if is_several(shared) else []
    if not rows or any(len(row) != len(rows) for row in rows):
        raise ScheduleError(
            f"cost shared={shared!r:.60} must be True, False, or a square table with shared[a][b] "
            "the number of the link from rank a to rank b"
        )
    numbers = tuple(tuple(plain_integer(entry) for entry in row) for row in rows)
    for a, row in enumerate(numbers):
        for b, number in enumerate(row):
            if number is None:
                raise ScheduleError(
                    f"cost shared[{a}][{b}]={rows[a][b]!r:.60} must be an integer, the number of a "
                    "link"
                )
    return numbers  # type: ignore[return-value]


def between_ranks(name: str, value: Latency, source: int, target: int) -> float:
    for argument, rank in (("source", source), ("target", target)):
        if (plain := plain_integer(rank)) is None or plain < 0:
            raise ScheduleError(f"{argument}={rank!r:.60} must be the number of a rank, 0 or more")
    if source == target:
        return 0.0
    if not isinstance(value, tuple):
        return value
    if max(source, target) >= len(value):
        raise ScheduleError(
            f"cost.{name} is a table of {len(value)} ranks and the schedule uses rank "
            f"{max(source, target)}: give a row and a column for each rank"
        )
    return value[source][target]


def checked_number(name: str, value: object, signed: bool = False) -> float:
    number = plain_number(value)
    if number is None or not math.isfinite(number) or (number < 0 and not signed):
        shown = value if number is None else number
        rule = "a finite number" if signed else "a finite number, at least 0"
        raise ScheduleError(f"cost {name}={shown!r:.60} must be {rule}")
    if value != 0 and not LEAST <= abs(number) <= MOST:
        raise ScheduleError(
            f"cost {name}={number:g} must be 0 or from {LEAST:g} to {MOST:g}: choose another unit"
        )
    return number


def check_kept(kept: PerStage | None) -> None:
    """Raise a `ScheduleError` unless it is known what a stage keeps that computes again."""
    if kept is None:
        raise ScheduleError(
            "cost.kept=None does not say what a stage keeps that computes its values again: "
            "give the activation of its input"
        )
