"""Methods of torch's that are replaced while something is traced: no mode sees their calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any


class StandIn:
    """Methods that stand in for others while anyone is within `active`.

    All threads call them then. In a thread that is not within `active`, where `is_active` is False,
    a stand-in must do what the method does that it replaces.

    Args:
        name: of the methods.
        methods: for each class or module, what stands there and what is to take its place.
    """

    def __init__(self, name: str, methods: Mapping[Any, tuple[Any, Any]]) -> None:
        self._name, self._methods = name, methods
        self._within: ContextVar[bool] = ContextVar(f"fpipe.{name}", default=False)
        self._lock = Lock()
        self._count = 0

    @property
    def is_active(self) -> bool:
        """Whether this thread or task is within `active`."""
        return self._within.get()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it the methods stand in."""
        token = self._within.set(True)
        self._counted(1)
        try:
            yield
        finally:
            self._counted(-1)
            self._within.reset(token)

    def _counted(self, more: int) -> None:
        with self._lock:
            before, self._count = self._count, self._count + more
            if bool(before) != bool(self._count):
                for kind, (own, other) in self._methods.items():
                    setattr(kind, self._name, other if self._count else own)
