"""Waiting for another rank without letting the core fall asleep.

A thread that is blocked leaves its core idle, and on a virtual machine it takes up to a millisecond
until a core that idled for long runs again: many times what a message over gloo takes. So a rank
that waits for the CPU's memory to change looks again and again, for a while, and blocks only then.
At first it looks as often as the system lets it, for most messages are there before a nap is over.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from torch import Tensor

Word = ctypes.c_uint32

BRIEF: Final = 60e-6
"""Seconds of a wait without a nap: between two looks the core is offered to others."""

NAP: Final = 50e-6
"""Seconds between two looks. They take a few microseconds each, so the core is free for others."""

PATIENCE: Final = 20e-3
"""Seconds after which to block: then a millisecond more is a twentieth of the wait at most."""

_MARK: Final = 0x7FA5C3E1
_BLANK: Final = 0x7FA5C3E2

_give_way: Final[Callable[[], object]] = getattr(os, "sched_yield", partial(time.sleep, 0))


def look_out(done: Callable[[], bool]) -> None:
    """Return when `done` says so, and at the latest when patience is out."""
    start = time.perf_counter()
    while not done():
        waited = time.perf_counter() - start
        if waited > PATIENCE:
            return
        if waited < BRIEF:
            _give_way()
        else:
            time.sleep(NAP)


LONG: Final = 30.0
"""Seconds after which whoever waits is told so."""


def look_now_and_then(
    done: Callable[[], bool], tell: Callable[[float], None] | None = None
) -> None:
    """Return when `done` says so, a twentieth of the wait or a twentieth of a second later.

    Whoever is blocked in torch hears of no signal, such as Ctrl-C, before the wait is over.

    Args:
        done: whether it is over.
        tell: is called once, with the seconds so far, when the wait has become long.
    """
    start = time.perf_counter()
    while not done():
        waited = time.perf_counter() - start
        if tell is not None and waited > LONG:
            tell(waited)
            tell = None
        time.sleep(min(max(waited, PATIENCE) / 20, 0.05))


class Arrival:
    """Whether something was received into a buffer yet.

    The works of gloo's receives do not tell before they are waited for. A value that fills the
    buffer from its start to its end does: its last four bytes are marked, and are something else
    afterwards. It is a hint. Where what arrives ends in the very mark, it is noticed later, by
    waiting.

    Args:
        buffer: contiguous, on the CPU, about to be received into, and kept until it was.
    """

    def __init__(self, buffer: Tensor) -> None:
        self._last = _last_word(buffer)
        if self._last is not None:
            self._last.value = _MARK

    def __call__(self) -> bool:
        return self._last is None or self._last.value != _MARK

    @property
    def is_blank(self) -> bool:
        """Whether what has arrived looks like what `make_blank` leaves; a hint, too."""
        return self._last is not None and self._last.value == _BLANK


def make_blank(values: Sequence[Tensor]) -> None:
    """Make of contiguous tensors what a rank sends that has not computed them.

    On the CPU the last one ends in another mark. All else is zero, for a rank that does not see the
    mark computes on them, until it hears of what failed: zeros are indices of something.
    """
    for value in values:
        value.zero_()
    if values and values[-1].device.type == "cpu":
        last = _last_word(values[-1])
        if last is not None:
            last.value = _BLANK


def _last_word(value: Tensor) -> Word | None:
    """The last bytes of a contiguous tensor on the CPU; None if it has too few."""
    size, word_size = value.numel() * value.element_size(), ctypes.sizeof(Word)
    return Word.from_address(value.data_ptr() + size - word_size) if size >= word_size else None
