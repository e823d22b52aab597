"""Waiting for another rank without letting the core fall asleep.

A thread that is blocked leaves its core idle, and on a virtual machine it takes up to a millisecond
until a core that idled for long runs again: many times what a message over gloo takes. So a rank
that waits for the CPU's memory to change looks again and again, for a while, and blocks only then.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Final

from torch import Tensor

NAP: Final = 50e-6
"""Seconds between two looks. They take a few microseconds each, so the core is free for others."""

PATIENCE: Final = 20e-3
"""Seconds after which to block: then a millisecond more is a twentieth of the wait at most."""

_MARK: Final = 0x7FA5C3E1


def look_out(done: Callable[[], bool]) -> None:
    """Return when `done` says so, and at the latest when patience is out."""
    end = time.perf_counter() + PATIENCE
    while not done() and time.perf_counter() < end:
        time.sleep(NAP)


class Arrival:
    """Whether something was received into a buffer yet.

    The works of gloo's receives do not tell before they are waited for. What fills the buffer from
    its start to its end does: its last four bytes are marked, and are something else afterwards. It
    is a hint. Where what arrives ends in the very mark, it is noticed later, by waiting.

    Args:
        buffer: contiguous, on the CPU, about to be received into, and kept until it was.
    """

    def __init__(self, buffer: Tensor) -> None:
        size = buffer.numel() * buffer.element_size()
        self._last: ctypes.c_uint32 | None = None
        if size >= ctypes.sizeof(ctypes.c_uint32):
            end = buffer.data_ptr() + size
            self._last = ctypes.c_uint32.from_address(end - ctypes.sizeof(ctypes.c_uint32))
            self._last.value = _MARK

    def __call__(self) -> bool:
        return self._last is None or self._last.value != _MARK
