"""A schedule as text: one line per rank, one column per unit of time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from fpipe.errors import ScheduleError
from fpipe.schedule.action import Action, Op
from fpipe.schedule.arguments import plain_integer
from fpipe.schedule.dependencies import earliest_starts


def sizes(ranks: int, stages: int, microbatches: int) -> str:
    """The numbers of ranks, stages and microbatches, in words.

    Example:
        >>> sizes(1, 2, 8)
        '1 rank, 2 stages, 8 microbatches'
    """
    return ", ".join(
        f"{number} {noun if number == 1 else plural}"
        for number, noun, plural in (
            (ranks, "rank", "ranks"),
            (stages, "stage", "stages"),
            (microbatches, "microbatch", "microbatches"),
        )
    )


def one_line(name: str) -> str:
    """A name for use within a line: in quotes, with escapes, if it has unprintable characters.

    Example:
        >>> one_line("zb_h1"), one_line("two\\nlines")
        ('zb_h1', "'two\\\\nlines'")
    """
    return name if name.isprintable() else repr(name)


WIDTH: Final = 80  # what every terminal has
BANDS: Final = 6
FIVE: Final = 5  # every fifth column is numbered, and a band ends before a number


class Rows(Protocol):
    """The attributes of a `Schedule` that a grid reads."""

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage."""

    @property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of each rank."""


def text_grid(schedule: Rows, *, width: int | None = WIDTH, bands: int | None = BANDS) -> str:
    """Draw a schedule: a line for each rank, a column for each unit of time, blank where it waits.

    Every action takes one unit and starts as soon as its rank is free and its inputs are there. So
    B is drawn as short as F, and sending takes no time: the grid shows the order and the waits, not
    seconds. A cell is ``F0`` (op, microbatch) where every rank has the stage of its own
    number alone, else ``2F0`` (stage, op, microbatch). Every fifth column is numbered.

    A schedule that cannot run (`fpipe.verify` says why) is drawn as its plain rows, without time.

    Args:
        schedule: any schedule, or any object with its `placement` and `actions`.
        width: characters in a line. A longer grid is wrapped into bands, one below the other, of as
            many times five columns as fit, and five at least. None for no limit.
        bands: the most bands, 2 or more. A longer grid is drawn without its middle, and a line says
            what is left out. None for no limit.

    Returns:
        The lines, joined by newlines, none of which ends in a space.

    Raises:
        ScheduleError: `width` is less than 1 or `bands` less than 2, or one is not an integer.

    Example:
        >>> from fpipe.schedule.families.single_stage import one_f_one_b
        >>> print(text_grid(one_f_one_b(ranks=3, microbatches=4)))
        time    0              5              10
        rank 0  F0 F1 F2       B0 F3 B1    B2    B3
        rank 1     F0 F1    B0 F2 B1 F3 B2    B3
        rank 2        F0 B0 F1 B1 F2 B2 F3 B3
    """
    width = _limit("width", width, 1)
    bands = _limit("bands", bands, 2)
    starts = earliest_starts(schedule.actions, len(schedule.placement), dict.fromkeys(Op, 1))
    lines = []
    if starts is None:
        lines.append("(cannot run as it stands, so there is no time in it; fpipe.verify says why)")
        times: list[Sequence[int]] = [range(len(row)) for row in schedule.actions]
    else:
        times = [list(map(int, row)) for row in starts]
    labels = ["place" if lines else "time", *(f"rank {rank}" for rank in range(len(times)))]
    margin = max(map(len, labels))
    plain = _is_plain(schedule)
    widths = _widths(schedule, times, plain)
    cuts = list(_cuts(widths, None if width is None else width - margin))
    for number, (start, end) in enumerate(cuts):
        if bands is not None and bands // 2 <= number < len(cuts) - (bands - bands // 2):
            if number == bands // 2:
                after = cuts[-(bands - bands // 2)][0]
                lines += ["", f"... {start} to {after - 1} left out, which bands=None draws ..."]
            continue
        if number:
            lines.append("")
        span = range(start, end)
        numbers = [str(time) if time % FIVE == 0 else "" for time in span]
        band = [numbers, *_cells(schedule, times, plain, span)]
        for row, label in zip(band, labels, strict=True):
            cells = (cell.ljust(widths[time]) for time, cell in zip(span, row, strict=True))
            lines.append("  ".join([label.ljust(margin), " ".join(cells)]).rstrip())
    return "\n".join(lines)


def _limit(name: str, value: int | None, least: int) -> int | None:
    if value is None:
        return None
    limit = plain_integer(value)
    if limit is None or limit < least:
        raise ScheduleError(f"{name}={value!r:.60} must be {least} or more, or None for no limit")
    return limit


def _is_plain(schedule: Rows) -> bool:
    """Whether each rank runs the stage of its own number and no other."""
    return schedule.placement == tuple(range(len(schedule.actions))) and all(
        action.stage == rank for rank, row in enumerate(schedule.actions) for action in row
    )


def _in_words(action: Action, plain: bool) -> str:
    return str(action).removeprefix(str(action.stage)) if plain else str(action)


def _widths(schedule: Rows, times: Sequence[Sequence[int]], plain: bool) -> list[int]:
    """The width of each column, for its number and its cells.

    Only this visits every action, and nothing visits every cell: there may be a thousand times as
    many.
    """
    count = max((row[-1] + 1 for row in times if row), default=0)
    widths = [len(str(time)) if time % FIVE == 0 else 0 for time in range(count)]
    for row, starts in zip(schedule.actions, times, strict=True):
        for action, time in zip(row, starts, strict=True):
            widths[time] = max(widths[time], len(_in_words(action, plain)))
    return widths


def _cells(
    schedule: Rows, times: Sequence[Sequence[int]], plain: bool, span: range
) -> Iterator[list[str]]:
    """The cells of each rank in a span of time."""
    for row, starts in zip(schedule.actions, times, strict=True):
        cells = [""] * len(span)
        for at in range(bisect_left(starts, span.start), bisect_left(starts, span.stop)):
            cells[starts[at] - span.start] = _in_words(row[at], plain)
        yield cells


def _cuts(widths: Sequence[int], width: int | None) -> Iterator[tuple[int, int]]:
    """Cut the columns into bands of at most `width`, each from a first column up to an end."""
    start = used = 0
    for five in range(0, len(widths), FIVE):
        needed = sum(cell + 1 for cell in widths[five : five + FIVE])
        if width is not None and five > start and used + needed + 1 > width:
            yield start, five
            start, used = five, 0
        used += needed
    yield start, len(widths)
