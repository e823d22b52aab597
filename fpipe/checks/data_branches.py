"""Functions that look at data: traced once more as compiled code runs, which may not look.

Libraries that have code to spare themselves work, such as a mask that masks nothing, look at data
for it, and leave that out where `torch.compiler.is_compiling()` says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from fpipe.checks.explain import place
from fpipe.errors import StageError

log = logging.getLogger("fpipe")

T = TypeVar("T")

_AS_COMPILED: ContextVar[bool] = ContextVar("fpipe.as_compiled", default=False)


@contextmanager
def is_compiling(choice: bool | None = None) -> Iterator[None]:
    """Within it `torch.compiler.is_compiling()` is what a user chose for a traced function.

    Args:
        choice: None for what it is, and True where the trace is made `once_more`.
    """
    before, again = torch.compiler._is_compiling_flag, _AS_COMPILED.get()
    wanted = again if choice is None else choice
    torch.compiler._is_compiling_flag = wanted or (before and not again)
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def once_more(attempt: Callable[[], T]) -> T:
    """Make a trace; one that looks at data is made once more, as compiled code runs.

    Args:
        attempt: makes the trace, in which functions run within `is_compiling`.

    Raises:
        StageError: the refusal of the second trace if it looks at data too, or of the first.
    """
    try:
        return attempt()
    except StageError as error:
        cause = _look(error)
        if cause is None or _AS_COMPILED.get():
            raise
        refusal: StageError | None = error
    token = _AS_COMPILED.set(True)
    try:
        value = attempt()
        log.info(
            "traced as compiled code runs, where torch.compiler.is_compiling() is True: otherwise "
            "the trace looks at data (%s)%s",
            cause,
            place(cause),
        )
        return value
    except StageError as error:
        if _look(error) is not None:
            raise
        assert refusal is not None
        raise refusal from refusal.__cause__
    finally:
        _AS_COMPILED.reset(token)
        # This frame is behind the traceback of what it raises, and would keep itself.
        refusal = cause = None


def _look(error: BaseException) -> BaseException | None:
    """The error of torch's that says that data was looked at, if that is why a trace failed."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, DataDependentOutputException | DynamicOutputShapeException):
            return cause
        cause = cause.__cause__
    return None
