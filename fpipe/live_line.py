"""One live line that says what takes long: tracing, compiling, measuring, searching, reading.

    with working("compiling")          shown after a second, gone at the end; one line stays
        advance("F of stage 0")  ──►   fpipe: compiling, 3 of 12, F of stage 0, 9 s, about 40 s left

On a terminal the line is written over and over, by a thread of its own where a part takes long; a
notebook has one output for it, which is replaced. Elsewhere, as in a log file, each piece of work
writes one line when it has ended.
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
from importlib import import_module
from math import inf
from threading import Event, RLock, Thread
from typing import Any, Final

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
        unit: of its parts.
        done: how many parts have begun.
        part: the one that has.
        start: when it began, by `time.perf_counter`.
        warm: when its second part began: the first often starts what all others use.
        line: shows it.
    """

    what: str
    total: int | None
    unit: str
    line: Line
    done: int = 0
    part: str = ""
    start: float = field(default_factory=_now)
    warm: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return _now() - self.start

    def text(self) -> str:
        """The text of the live line."""
        words = [self.what]
        if self.done and self.total:
            words.append(f"{self.done} of {max(self.done, self.total)}")
        elif self.done:
            words.append(str(self.done))
        words += [self.part] if self.part else []
        words.append(f"{self.seconds:.0f} s")
        if self.total and 2 < self.done < self.total:
            left = (_now() - self.warm) / (self.done - 2) * (self.total - self.done + 1)
            words.append(f"about {left:.0f} s left")
        return f"fpipe: {', '.join(words)}"


class Line:
    """Shows a piece of work and all that are parts of it, the innermost at any time.

    Attributes:
        works: under way, the outermost first.
    """

    def __init__(self) -> None:
        self.works: list[Work] = []
        self._drawn = -inf
        self._lock = RLock()
        self._over = Event()
        self._thread: Thread | None = None
        self._output: Any = None  # of a notebook

    def begin(self, work: Work) -> None:
        self.works.append(work)
        if self._thread is None and _is_live():
            self._thread = Thread(target=self._tick, name="fpipe live line", daemon=True)
            self._thread.start()

    def advance(self, work: Work, part: str, parts: int) -> None:
        with self._lock:
            work.done += parts
            work.part = part
            if parts and work.done == 2:
                work.warm = _now()
            self.draw()

    def draw(self) -> None:
        """Show the innermost work, unless it is too early or has just been shown."""
        with self._lock:
            now = _now()
            if not self.works or now - self._drawn < EVERY or self.works[0].seconds < DELAY:
                return
            self._drawn = now
            if _is_live():
                self._write(self.works[-1].text())

    def end(self) -> None:
        """End the innermost work: take the live line away, and leave one that says what was done.

        On a terminal and in a notebook, only the outermost leaves one.
        """
        with self._lock:
            outermost, work = self.works[0], self.works.pop()
            shown, live = outermost.seconds >= DELAY, _is_live()
            stays = work.seconds >= DELAY and (work is outermost or not live)
            parts = f", {work.done} {work.unit}" if work.done > 1 else ""
            text = f"fpipe: {work.what}: {work.seconds:.1f} s{parts}" if stays else ""
            if shown and _is_notebook():
                if work is outermost:
                    self._write(text)
            elif shown:
                if live:
                    self._write("")
                if text:
                    _print(text)
        if work is outermost:
            self._over.set()
            if self._thread is not None:
                self._thread.join()

    def _tick(self) -> None:
        """Draw again and again, until all work has ended."""
        wait = DELAY
        while not self._over.wait(wait):
            wait = max(EVERY, 0.01)
            self.draw()

    def _write(self, text: str) -> None:
        """Write over the live line; nothing is left of it where the text is empty."""
        if _is_notebook():
            output: Any = {"text/plain": text}
            if self._output is not None:
                self._output.update(output, raw=True)
            elif text:
                display = import_module("IPython.display").display
                self._output = display(output, raw=True, display_id=True)
        elif sys.stderr is not None:
            width = shutil.get_terminal_size((100, 24)).columns - 1
            end = "" if text else "\r"
            sys.stderr.write(f"\r{text[:width].ljust(width)}{end}")
            sys.stderr.flush()


_CURRENT: ContextVar[Work | None] = ContextVar("fpipe.work", default=None)


def progress(shown: bool = True) -> None:
    """Show, or do not show, what takes long: tracing, compiling, searching, measuring, reading.

    By default it is shown on the standard error of the process, over a process group on that of the
    first rank, unless the environment variable ``FPIPE_PROGRESS`` is ``0``. Work of less than a
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
def working(
    what: str, total: Callable[[], int] | None = None, unit: str = "parts"
) -> Iterator[None]:
    """Within it the live line is about this work, and `advance` about its parts.

    Args:
        what: is done.
        total: returns the number of its parts, if it is known.
        unit: of its parts.
    """
    shown = os.environ.get("FPIPE_PROGRESS", "1") != "0" if _shown is None else _shown
    if not (shown and _is_first()):
        yield
        return
    outer = _CURRENT.get()
    line = Line() if outer is None else outer.line
    work = Work(what, total if total is None else total(), unit, line)
    token = _CURRENT.set(work)
    line.begin(work)
    try:
        yield
    finally:
        _CURRENT.reset(token)
        line.end()


def advance(part: str = "", parts: int = 1) -> None:
    """Say that the next part of the work begins; nothing where no work is under way.

    Args:
        part: its name.
        parts: how many begin: none if this is the rest of one that has begun before.
    """
    work = _CURRENT.get()
    if work is None:
        return
    work.line.advance(work, part, parts)


def _is_first() -> bool:
    """Whether this process is the first of its group, if it has one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return os.environ.get("RANK", "0") == "0"
    return bool(distributed.get_rank() == 0)


def _is_live() -> bool:
    """Whether a line can be written over: on a terminal, or in a notebook."""
    return _is_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def _is_notebook() -> bool:
    return type(sys.stderr).__name__ == "OutStream" and "IPython" in sys.modules


def _print(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
