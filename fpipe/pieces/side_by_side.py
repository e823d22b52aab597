"""Graphs whose loops are compiled side by side, while the next ones are written.

    this thread   write 1 │ write 2 │ write 3 │ wait for all
    compilers             └─ 1 ─────┴─┬───────┴─── 3
                                      └─ 2 ────

Inductor compiles the loops of a graph in as many threads as there are processors, and waits for
them before it comes to the next graph. Here all are waited for at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

Waits = list[Callable[[], None]]

_COLLECTED: ContextVar[Waits | None] = ContextVar("fpipe.waits", default=None)
_DEFERS: ContextVar[bool] = ContextVar("fpipe.defers", default=False)


@contextmanager
def collected(waits: Waits) -> Iterator[None]:
    """Within it graphs may be handed over whose loops are still compiled.

    Args:
        waits: gets what waits for the loops of a graph, and raises if one cannot be compiled. The
            graph can be called after that.
    """
    token = _COLLECTED.set(waits)
    try:
        yield
    finally:
        _COLLECTED.reset(token)


@contextmanager
def deferred() -> Iterator[None]:
    """Within it, in this thread, Inductor does not wait for loops, if anyone collects the waits.

    Nothing that it makes may be called there.
    """
    _let_waits_be_collected()
    token = _DEFERS.set(True)
    try:
        yield
    finally:
        _DEFERS.reset(token)


@cache
def _let_waits_be_collected() -> None:
    from torch._inductor.async_compile import AsyncCompile

    wait_now = AsyncCompile.wait

    def wait(self: AsyncCompile, scope: dict[str, Any]) -> None:
        waits = _COLLECTED.get() if _DEFERS.get() else None
        if waits is None:
            wait_now(self, scope)
        else:
            waits.append(lambda: wait_now(self, scope))

    AsyncCompile.wait = wait  # type: ignore[method-assign]
