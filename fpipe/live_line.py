"""One live line that says what takes long: tracing, compiling, measuring, searching, reading.

    with working("compiling")          shown after a second, gone at the end; one line stays
        advance("F of stage 0")  ──►   fpipe: compiling, 3 of 12, F of stage 0, 9 s, about 40 s left

On a terminal, and in a notebook, the line is written over and over; elsewhere, as in a log file,
each piece of work writes one line when it has ended.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import inf
from typing import Final

DELAY: Final = 1.0
"""Seconds of work before anything is shown, and less of which nothing stays."""

EVERY: Final = 0.1
"""Seconds between two states of the live line."""

_shown: bool | None = None


def _now() -> float:
    return time.perf_counter()


@dataclass
class Work:
    """A piece of work that is under way.

    Attributes:
        what: is done, such as ``"compiling"``.
        total: the number of its parts, if that is known.
        done: how many parts have begun.
        part: the one that has.
        start: when it began, by `time.perf_counter`.
        outer: the work of which it is a part.
        drawn: when the live line was written last.
    """

    what: str
    total: int | None
    done: int = 0
    part: str = ""
    start: float = field(default_factory=_now)
    outer: Work | None = None
    drawn: float = -inf

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return _now() - self.start

    def text(self) -> str:
        """What the live line says."""
        words = [self.what]
        if self.done and self.total:
            words.append(f"{self.done} of {max(self.done, self.total)}")
        elif self.done:
            words.append(str(self.done))
        words += [self.part] if self.part else []
        words.append(f"{self.seconds:.0f} s")
        if self.total and 1 < self.done < self.total:
            left = self.seconds / (self.done - 1) * (self.total - self.done + 1)
            words.append(f"about {left:.0f} s left")
        return f"fpipe: {', '.join(words)}"


_CURRENT: ContextVar[Work | None] = ContextVar("fpipe.work", default=None)


def progress(shown: bool = True) -> None:
    """Show, or do not show, what takes long: tracing, compiling, searching, measuring, reading.

    By default it is shown on the standard error of the process, over a process group on that of the
    first rank, unless the environment variable ``FPIPE_PROGRESS`` is ``0``. What takes less than a
    second is never shown. The logger ``fpipe`` says more, at level INFO.

    Args:
        shown: whether to show it from here on.

    Example:
        >>> import fpipe
        >>> fpipe.progress(False)
    """
    global _shown
    _shown = bool(shown)


@contextmanager
def working(what: str, total: Callable[[], int] | None = None) -> Iterator[None]:
    """Within it the live line is about this work, and `advance` about its parts.

    Args:
        what: is done.
        total: returns the number of its parts, if it is known.
    """
    shown = os.environ.get("FPIPE_PROGRESS", "1") != "0" if _shown is None else _shown
    if not (shown and _is_first()):
        yield
        return
    work = Work(what, total if total is None else total(), outer=_CURRENT.get())
    token = _CURRENT.set(work)
    try:
        yield
    finally:
        _CURRENT.reset(token)
        _end(work)


def advance(part: str = "") -> None:
    """Say that the next part of the work begins; nothing where no work is under way."""
    work = _CURRENT.get()
    if work is None:
        return
    work.done += 1
    work.part = part
    now = _now()
    if now - work.drawn < EVERY:
        return
    work.drawn = now
    if _age(work) >= DELAY and _is_live():
        _write(work.text())


def _age(work: Work) -> float:
    """Seconds since the outermost work began."""
    while work.outer is not None:
        work = work.outer
    return work.seconds


def _end(work: Work) -> None:
    """Take the live line away, and leave one line that says what was done."""
    if _age(work) < DELAY:
        return
    live = _is_live()
    if live:
        _write("")
    if work.seconds >= DELAY and (work.outer is None or not live):
        parts = f", {work.done} parts" if work.done > 1 else ""
        _print(f"fpipe: {work.what}: {work.seconds:.1f} s{parts}")


def _is_first() -> bool:
    """Whether this process is the first of its group, if it has one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return os.environ.get("RANK", "0") == "0"
    return bool(distributed.get_rank() == 0)


def _is_live() -> bool:
    """Whether a line can be written over: on a terminal, or in a notebook."""
    stream = sys.stderr
    return stream is not None and (stream.isatty() or type(stream).__name__ == "OutStream")


def _write(text: str) -> None:
    """Write over the live line; nothing is left of it where the text is empty."""
    width = shutil.get_terminal_size((100, 24)).columns - 1
    if sys.stderr is not None:
        end = "" if text else "\r"
        sys.stderr.write(f"\r{text[:width].ljust(width)}{end}")
        sys.stderr.flush()


def _print(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
