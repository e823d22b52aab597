"""Ctrl-C while something is traced is raised where an operation begins, and nowhere else.

torch enters and leaves its modes several times an operation. An exception in the midst of that
leaves one behind, and then every tensor that the process makes is an abstract one.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


class _Raised(BaseException):
    """What a handler has raised, on its way through those who explain errors of a trace."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


_HELD: list[Handler] = []
"""The handler that is to be called, if the signal has come."""


@contextmanager
def held_back() -> Iterator[None]:
    """Within it the handler of SIGINT is called where `let_through` is, at the latest at the end.

    Whoever insists, and sends it a second time, has it called at once.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(handler) or getattr(handler, "holds", False):
        yield
        return

    def hold(number: int, frame: FrameType | None) -> None:
        if _HELD:
            _HELD.pop()(number, frame)
        else:
            _HELD.append(handler)

    hold.holds = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    except _Raised as raised:
        raise raised.error from None
    finally:
        signal.signal(signal.SIGINT, handler)
        if _HELD:
            _HELD.pop()(signal.SIGINT, sys._getframe())


def let_through() -> None:
    """Call the handler that was held back, if there is one."""
    if _HELD and threading.current_thread() is threading.main_thread():
        try:
            _HELD.pop()(signal.SIGINT, sys._getframe(1))
        except Exception as error:
            raise _Raised(error) from error
