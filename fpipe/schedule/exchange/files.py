"""Files: how they are opened and written, and what a schedule file holds."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from fpipe.errors import ScheduleError
from fpipe.schedule.action import Action

PathLike: TypeAlias = str | os.PathLike[str]


class Plain(NamedTuple):
    """The content of a schedule file: the arguments of `Schedule`, in its order."""

    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    name: str


class Cell(NamedTuple):
    """An action, and its column in the file, counted from 1."""

    action: Action
    column: int


def load(path: PathLike) -> str:
    """The text of a file, which must be UTF-8; line ends stay as they are.

    Raises:
        ScheduleError: `path` is not a path, or the file is not text.
        OSError: it cannot be opened.
    """
    file = _file(path)
    if ("\n" in str(path) or len(str(path)) > _LONGEST) and not os.path.isfile(file):
        raise ScheduleError(
            f"path={str(path)!r:.60} is the text of a file, not its name: give to_csv and to_json "
            "a path to write to, and read that"
        )
    try:
        # Spreadsheets put a byte order mark first, which the codec drops.
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScheduleError(
            f"{os.fspath(path)}: byte {error.start} is not UTF-8 text, and all that fpipe reads is"
        ) from error


_LONGEST: Final = 4096
"""No system opens a file of a longer name."""


def _file(path: Any) -> Path:
    try:
        return Path(path)
    except TypeError as error:
        raise ScheduleError(
            f"path={path!r:.60} must be the name of a file: a string or a pathlib.Path"
        ) from error


def is_number(word: str) -> bool:
    """Whether a word is the number of a rank, short enough for Python to parse."""
    return word.isascii() and word.isdigit() and len(word) <= 18


def load_json(text: str, source: str) -> Any:
    """Parse a JSON text.

    Raises:
        ScheduleError: it is not JSON, or an object has a key twice.
    """

    def entries(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise ScheduleError(f"{source}: has the key {twice!r:.60} twice: leave one out")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=entries)
    except json.JSONDecodeError as error:
        raise ScheduleError(f"{source}: not JSON: {error}") from error
    except RecursionError as error:
        raise ScheduleError(f"{source}: not JSON: nested too deeply") from error
    except ScheduleError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise ScheduleError(f"{source}: a number in it is too long to read") from error


def save(path: PathLike | None, text: str) -> str:
    """Write `text` to `path`, unless `path` is None, and return it.

    A name may hold lone surrogates, as that of a file whose name is not UTF-8 does. The file has a
    question mark instead.

    Raises:
        ScheduleError: `path` is neither a path nor None.
        OSError: the file cannot be written; the error names the file.
    """
    if path is not None:
        file = _file(path)
        try:
            file.write_bytes(text.encode(errors="replace"))
        except OSError as error:
            if error.filename is None:  # the file could be opened and took nothing more
                error.filename = os.fspath(path)
            raise
    return text


def implied_placement(
    rows: Sequence[Sequence[Cell]], where: Callable[[int, int], str]
) -> tuple[int, ...]:
    """The placement that the rows imply: the rank of a stage is the one that runs it.

    The error names places in the file by `where`, of rank and column.

    Raises:
        ScheduleError: two ranks run the same stage, or no rank runs a stage below the greatest.

    Example:
        >>> from fpipe.schedule.action import Action
        >>> rows = [[Cell(Action.parse("0F0"), 1)], [Cell(Action.parse("1F0"), 1)]]
        >>> implied_placement(rows, lambda rank, column: f"row {rank + 1}, column {column}")
        (0, 1)
    """
    first: dict[int, tuple[int, int]] = {}
    for rank, row in enumerate(rows):
        for action, column in row:
            seen = first.setdefault(action.stage, (rank, column))
            if seen[0] != rank:
                raise ScheduleError(
                    f"{where(rank, column)}: {action} is on rank {rank}, and stage {action.stage} "
                    f"is on rank {seen[0]} already ({where(*seen)}): a stage lives on one rank"
                )
    greatest = max(first, default=-1)
    for stage in range(greatest + 1):
        if stage not in first:
            raise ScheduleError(
                f"{where(*first[greatest])}: stage {greatest} is named here, and stage {stage} "
                "nowhere: stages are numbered from 0 without a gap, and each has an action"
            )
    return tuple(first[stage][0] for stage in range(greatest + 1))
