"""Replace functions of torch in this thread while something is traced."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


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


class Instead(TorchFunctionMode):
    """Within it other functions are called in place of those of torch.

    Args:
        others: by the function of torch.
    """

    def __init__(self, others: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._others = others

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or what stands for it."""
        return self._others.get(func, func)(*args, **(kwargs or {}))


class StandIn:
    """Methods that stand in for others while anyone is within `active`: no mode sees their calls.

    All threads call them then. In a thread that is not within `active`, where `is_active` is False,
    a stand-in must do what the method does that it replaces, which `own` returns: what stood there
    when it took its place, for others replace methods too, as torch._dynamo does when it is loaded.

    Args:
        name: of the methods.
        methods: for each class or module, what is to take the place of what stands there.
    """

    def __init__(self, name: str, methods: Mapping[Any, Any]) -> None:
        self._name, self._methods = name, methods
        self._originals = {kind: vars(kind)[name] for kind in methods}
        # The last attributes that were there before, and so call no stand-in.
        self._known = {
            kind: deque([original], maxlen=16) for kind, original in self._originals.items()
        }
        self._above: dict[Any, Any] = {}  # what was put over a stand-in, and may call it for ever
        self._within: ContextVar[bool] = ContextVar(f"fpipe.{name}", default=False)
        self._turns = Turns()
        self._count = 0

    @property
    def is_active(self) -> bool:
        """Whether this thread or task is within `active`."""
        return self._within.get()

    def original(self, kind: Any) -> Any:
        """The current attribute of a class or module, or the one that was replaced."""
        return self._originals[kind]

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
        with self._turns():
            before, self._count = self._count, self._count + more
            if bool(before) == bool(self._count):
                return
            for kind, other in self._methods.items():
                (self._replace if self._count else self._restore)(kind, other)

    def _replace(self, kind: Any, other: Any) -> None:
        stands = vars(kind)[self._name]
        # Whoever put something over a stand-in may put that back when it is not active.
        if stands is other or stands is self._above.get(kind):
            return
        self._originals[kind] = stands
        if not _is_among(stands, self._known[kind]):
            self._known[kind].append(stands)
        setattr(kind, self._name, other)

    def _restore(self, kind: Any, other: Any) -> None:
        stands = vars(kind)[self._name]
        if stands is other:
            setattr(kind, self._name, self._originals[kind])
        elif not _is_among(stands, self._known[kind]):
            self._above[kind] = stands


def _is_among(one: Any, others: Iterable[Any]) -> bool:
    return any(one is other for other in others)


class Seeing(TorchDispatchMode):
    """A dispatch mode within which nothing is compiled.

    torch keeps Dynamo out of every call of a mode anew, which takes longer than most of what ours
    do. Tracing is kept from it as a whole.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
