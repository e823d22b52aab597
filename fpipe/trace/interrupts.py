"""While something is traced, handlers of signals (Ctrl-C) are called where an operation begins.

torch enters and leaves its modes several times an operation. An exception in the midst of that
leaves one behind, and then every tensor that the process makes is an abstract one.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

log = logging.getLogger("fpipe")

Handler = Callable[[int, FrameType | None], Any]


class _Raised(BaseException):
    """Carries an error of a handler past the code that explains errors of a trace."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


_HELD: dict[int, Handler] = {}
"""The handlers that are to be called, by the signals that have come."""


@contextmanager
def held_back() -> Iterator[None]:
    """Within it handlers of signals are called where `let_through` is, at the latest at the end.

    Whoever insists, and sends SIGINT a second time, has its handler called at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    installed = {number: signal.getsignal(number) for number in signal.valid_signals()}
    before: dict[int, Handler] = {
        number: handler
        for number, handler in installed.items()
        if callable(handler) and not getattr(handler, "holds", False)
    }

    def hold(number: int, frame: FrameType | None) -> None:
        if not hold.holds:  # type: ignore[attr-defined]  # it could not be taken away
            before[number](number, frame)
        elif number == signal.SIGINT and number in _HELD:
            del _HELD[number]
            log.warning(
                "interrupted in the midst of an operation: where torch behaves oddly from here on, "
                "start the process anew"
            )
            before[number](number, frame)
        else:
            _HELD[number] = before[number]

    hold.holds = True  # type: ignore[attr-defined]
    try:
        for number in before:
            signal.signal(number, hold)
        yield
    except _Raised as raised:
        raise raised.error from None
    finally:
        hold.holds = False  # type: ignore[attr-defined]
        with ExitStack() as stack:
            for number in [number for number in _HELD if number in before]:
                stack.callback(_HELD.pop(number), number, sys._getframe())
            for number, handler in before.items():
                stack.callback(signal.signal, number, handler)


def let_through() -> None:
    """Call a handler that was held back, if there is one."""
    if _HELD and threading.current_thread() is threading.main_thread():
        number = next(iter(_HELD))
        try:
            _HELD.pop(number)(number, sys._getframe(1))
        except Exception as error:
            raise _Raised(error) from error
