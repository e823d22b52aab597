"""A schedule as text that people write and read: a line per rank."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Final

from fpipe.errors import ScheduleError
from fpipe.schedule.action import Action
from fpipe.schedule.exchange.files import Cell, Plain, implied_placement, is_number

_RANK: Final = re.compile(r"\s*rank\s+(\d{1,18})\s*:", re.ASCII)
_PRINTED: Final = re.compile(r": \d+ ranks?, \d+ stages?, \d+ microbatch(es)?$")
_WORD: Final = re.compile(r"\S+")
_QUOTED: Final = re.compile(r'\s*schedule\s+("(?:[^"\\]|\\.)*")\s*(?:#.*)?$')


def format_text(placement: Sequence[int], actions: Sequence[Sequence[Action]], name: str) -> str:
    """Write a schedule as lines: its name, its placement, then the actions of each rank.

    Example:
        >>> print(format_text([0], [[Action.parse("0F0"), Action.parse("0B0")]], "tiny"), end="")
        schedule tiny
        placement 0
        rank 0: 0F0 0B0
    """
    plain = " ".join(name.split())
    if "#" in plain or plain.startswith('"'):
        plain = json.dumps(plain)
    lines = [f"schedule {plain}", f"placement {' '.join(map(str, placement))}"]
    lines += [
        " ".join([f"rank {rank}:", *map(str, row)]).rstrip() for rank, row in enumerate(actions)
    ]
    return "\n".join(lines) + "\n"


def parse_text(text: str, *, source: str = "text") -> Plain:
    """Read text that `format_text` or a person wrote.

    The lines ``schedule NAME`` and ``placement R R R`` (the rank of each stage) are optional: the
    rows imply a placement. So is ``rank N:``, because the rows are in order. Blank lines are
    skipped, and so is the text after a ``#``; a name with a ``#`` is in quotes, as in JSON.

    Errors call the text `source`.

    Raises:
        ScheduleError: a word is not an action, a line is out of order or a second of its kind, or
            there is no row. The text names line and column, counted from 1, and the reason.

    Example:
        >>> plain = parse_text("0F0 0B0  # first rank\\n1F0 1B0")
        >>> plain.placement, *map(str, plain.actions[1])
        ((0, 1), '1F0', '1B0')
    """
    name, placement = "custom", None
    seen: set[str] = set()
    rows: list[list[Cell]] = []
    numbers: list[int] = []  # the line of each row
    for number, whole in enumerate(text.splitlines(), 1):
        quoted = _QUOTED.match(whole)
        line = whole if quoted else whole.partition("#")[0]
        head, rest = (*line.split(maxsplit=1), "", "")[:2]
        if not head:
            continue
        if head in seen:
            raise ScheduleError(f"{source}: line {number}: a second {head}: leave one out")
        if head in ("schedule", "placement"):
            seen.add(head)
        if head == "schedule":
            name = _unquoted(quoted[1]) if quoted else rest.strip() or name
        elif head == "placement":
            placement = _placement(rest.split(), f"{source}: line {number}")
        else:
            numbers.append(number)
            rows.append(_row(line, len(rows), f"{source}: line {number}"))
    if not rows:
        raise ScheduleError(f"{source}: no line has actions: write a line for each rank")
    if placement is None:
        placement = implied_placement(rows, partial(_where, source, numbers))
    return Plain(placement, tuple(tuple(cell.action for cell in row) for row in rows), name)


def _unquoted(text: str) -> str:
    try:
        name: str = json.loads(text)
    except ValueError:
        return text
    return name


def _row(line: str, rank: int, place: str) -> list[Cell]:
    label = _RANK.match(line)
    if label is not None and int(label[1]) != rank:
        raise ScheduleError(
            f"{place}, column 1: 'rank {label[1]}' stands where rank {rank} belongs: there is a "
            "line for each rank, in order"
        )
    cells = []
    for word in _WORD.finditer(line, label.end() if label is not None else 0):
        try:
            cells.append(Cell(Action.parse(word[0]), word.start() + 1))
        except ScheduleError as error:
            printed = ""
            if "," in word[0]:
                printed = ". With commas it is a row of CSV, which Schedule.from_csv reads"
            if rank == 0 and _PRINTED.search(line) is not None:
                printed = ". This is how a schedule prints; what can be read is its .to_text()"
            raise ScheduleError(f"{place}, column {word.start() + 1}: {error}{printed}") from error
    return cells


def _placement(words: Sequence[str], place: str) -> tuple[int, ...]:
    for word in words:
        if not is_number(word):
            raise ScheduleError(
                f"{place}: placement has {word!r:.60}, which is no rank: 0, 1, 2, …"
            )
    return tuple(map(int, words))


def _where(source: str, numbers: Sequence[int], rank: int, column: int) -> str:
    return f"{source}: line {numbers[rank]} (rank {rank}), column {column}"
