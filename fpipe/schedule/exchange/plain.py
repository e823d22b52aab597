"""The parts of a schedule as a file has them, and how files are opened."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from fpipe.errors import ScheduleError
from fpipe.schedule.action import Action

PathLike: TypeAlias = str | os.PathLike[str]


class Plain(NamedTuple):
    """What a reader found: the arguments of `Schedule`, in its order."""

    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    name: str


class Cell(NamedTuple):
    """An action, and the column of its file where it stands, counted from 1."""

    action: Action
    column: int


def load(path: PathLike) -> str:
    """The text of a file, which must be UTF-8; line ends stay as they are.

    Raises:
        ScheduleError: `path` is none, or the file holds something other than text.
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
    """Whether a word numbers a rank. Python reads none of some thousand digits."""
    return word.isascii() and word.isdigit() and len(word) <= 18


def load_json(text: str, source: str) -> Any:
    """What a JSON text holds.

    Raises:
        ScheduleError: it is not JSON, or an object has a key twice, of which readers keep one.
    """

    def entries(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ScheduleError(f"{source}: has the key {twice!r:.60} twice: leave one out")
        return found

    try:
        return json.loads(text, object_pairs_hook=entries)
    except json.JSONDecodeError as error:
        raise ScheduleError(f"{source}: not JSON: {error}") from error
    except RecursionError as error:
        raise ScheduleError(f"{source}: not JSON: nested too deeply") from error
    except ScheduleError:
        raise
    except ValueError as error:  # of a number of thousands of digits
        raise ScheduleError(f"{source}: a number in it is too long to read") from error


def save(path: PathLike | None, text: str) -> str:
    """Write `text` to `path` as it is, unless `path` is None, and hand it back.

    A name may hold what is no character, as that of a file that is not named in UTF-8 does. In the
    file a question mark stands for it.

    Raises:
        ScheduleError: `path` is neither a path nor None.
        OSError: the file cannot be written; it always names the file.
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
