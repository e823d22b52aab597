"""The parts of a schedule as a file has them, and how files are opened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, TypeAlias

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
        ScheduleError: the file holds something other than text.
        OSError: it cannot be opened.
    """
    try:
        # Spreadsheets put a byte order mark first, which the codec drops.
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScheduleError(
            f"{os.fspath(path)}: byte {error.start} is not UTF-8 text, so this is no schedule file"
        ) from error


def save(path: PathLike | None, text: str) -> str:
    """Write `text` to `path` as it is, unless `path` is None, and hand it back."""
    if path is not None:
        Path(path).write_bytes(text.encode())
    return text
