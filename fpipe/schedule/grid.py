"""A schedule as text: one line per rank, one column per unit of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from fpipe.errors import ScheduleError
from fpipe.schedule.action import Action, Op
from fpipe.schedule.arguments import plain_integer
from fpipe.schedule.earliest import earliest_starts

WIDTH: Final = 80  # what every terminal has
BANDS: Final = 6
FIVE: Final = 5  # every fifth column is numbered, and a band ends before a number

Slots = list[Action | None]  # what a rank does in each unit of time


class Rows(Protocol):
    """As much of a `Schedule` as a grid reads."""

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage."""

    @property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of each rank."""


def text_grid(schedule: Rows, *, width: int | None = WIDTH, bands: int | None = BANDS) -> str:
    """Draw a schedule: a line for each rank, a column for each unit of time, blank where it waits.

    Every action takes one unit and starts as soon as its rank is free and its inputs are there. So
    B is drawn as short as F, and sending takes no time: the grid shows the order and who waits for
    whom, not seconds. A cell is ``F0`` (op, microbatch) where every rank has the stage of its own
    number alone, else ``2F0`` (stage, op, microbatch). Every fifth column is numbered.

    A schedule that cannot run (`fpipe.verify` says why) is drawn as its plain rows, without time.

    Args:
        schedule: any schedule, or what has its `placement` and `actions`.
        width: characters in a line. A longer grid is wrapped into bands, one below the other, of as
            many times five columns as fit, and five at least. None for no limit.
        bands: how many bands at most, 2 or more. Of a longer grid the first and the last are drawn,
            and a line between them says what is left out. None for no limit.

    Returns:
        The lines, joined by newlines, none of which ends in a space.

    Raises:
        ScheduleError: `width` is less than 1 or `bands` less than 2, or one is no integer.

    Example:
        >>> from fpipe.schedule.families.one_f_one_b import one_f_one_b
        >>> print(text_grid(one_f_one_b(ranks=3, microbatches=4)))
        time    0              5              10
        rank 0  F0 F1 F2       B0 F3 B1    B2    B3
        rank 1     F0 F1    B0 F2 B1 F3 B2    B3
        rank 2        F0 B0 F1 B1 F2 B2 F3 B3
    """
    width = _limit("width", width, 1)
    bands = _limit("bands", bands, 2)
    slots = _timed(schedule)
    lines = []
    if slots is None:
        lines.append("(cannot run as it stands, so there is no time in it; fpipe.verify says why)")
        slots = [list(row) for row in schedule.actions]
    labels = ["place" if lines else "time", *(f"rank {rank}" for rank in range(len(slots)))]
    margin = max(map(len, labels))
    columns = list(_columns(slots, _is_plain(schedule)))
    cuts = list(_cuts(columns, None if width is None else width - margin))
    for number, (start, end) in enumerate(cuts):
        if bands is not None and bands // 2 <= number < len(cuts) - (bands - bands // 2):
            if number == bands // 2:
                after = cuts[-(bands - bands // 2)][0]
                lines += ["", f"... {start} to {after - 1} left out, which bands=None draws ..."]
            continue
        if number:
            lines.append("")
        for row, label in enumerate(labels):
            cells = (column[row] for column in columns[start:end])
            lines.append("  ".join([label.ljust(margin), " ".join(cells)]).rstrip())
    return "\n".join(lines)


def _limit(name: str, value: int | None, least: int) -> int | None:
    if value is None:
        return None
    limit = plain_integer(value)
    if limit is None or limit < least:
        raise ScheduleError(f"{name}={value!r:.60} must be {least} or more, or None for no limit")
    return limit


def _timed(schedule: Rows) -> list[Slots] | None:
    """What each rank does in each unit of time; None where some of it can never start."""
    starts = earliest_starts(schedule.actions, len(schedule.placement), dict.fromkeys(Op, 1))
    if starts is None:
        return None
    slots: list[Slots] = []
    for row, times in zip(schedule.actions, starts, strict=True):
        slots.append([None] * (int(times[-1]) + 1 if times else 0))
        for action, time in zip(row, times, strict=True):
            slots[-1][int(time)] = action
    return slots


def _is_plain(schedule: Rows) -> bool:
    """Whether each rank runs the stage of its own number and no other."""
    return schedule.placement == tuple(range(len(schedule.actions))) and all(
        action.stage == rank for rank, row in enumerate(schedule.actions) for action in row
    )


def _columns(slots: Sequence[Slots], plain: bool) -> Iterator[list[str]]:
    """The columns from left to right: number, then a cell for each rank, all of one width."""
    for time in range(max(map(len, slots))):
        cells = [str(time) if time % FIVE == 0 else ""]
        for row in slots:
            action = row[time] if time < len(row) else None
            text = "" if action is None else str(action)
            cells.append(text.removeprefix(str(action.stage)) if action and plain else text)
        width = max(map(len, cells))
        yield [cell.ljust(width) for cell in cells]


def _cuts(columns: Sequence[Sequence[str]], width: int | None) -> Iterator[tuple[int, int]]:
    """Cut the columns into bands of at most `width`, each from a first column up to an end."""
    start = used = 0
    for five in range(0, len(columns), FIVE):
        needed = sum(len(column[0]) + 1 for column in columns[five : five + FIVE])
        if width is not None and five > start and used + needed + 1 > width:
            yield start, five
            start, used = five, 0
        used += needed
    yield start, len(columns)
