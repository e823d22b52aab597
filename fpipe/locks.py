"""Locks that a forked process has anew."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """One thread at a time, which may come in again; anew in a forked process.

    There the thread whose turn it is does not exist.
    """

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):  # not on Windows, where nothing is forked
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            yield
