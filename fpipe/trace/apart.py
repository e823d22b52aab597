"""A trace is of the function alone, whatever its caller, and other threads, are at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.nn.utils.parametrize as parametrize
from torch._C import _autograd

from fpipe.checks.explain import Untraceable
from fpipe.locks import Turns

one_at_a_time = Turns()
"""Within it no other thread traces: torch cannot do so in two at one time."""


@contextmanager
def apart() -> Iterator[None]:
    """Within it nothing of the caller's is called or filled that is not about what is traced.

    Those are hooks on saved tensors, such as `torch.utils.checkpoint` has around what it calls; and
    the cache of parametrized tensors, which would hold abstract ones from then on.
    """
    token = _TRACING.set(True)
    try:
        with _without_saving(), _with_own_cache():
            yield
    finally:
        _TRACING.reset(token)


def refuse_within() -> None:
    """Refuse a call of a pipeline in what is traced.

    Raises:
        Untraceable: this thread is tracing.
    """
    if _TRACING.get():
        raise Untraceable(
            "calls a pipeline",
            "a stage is a function that is traced, and a pipeline runs what was: call the "
            "functions that it was made of",
        )


_TRACING: ContextVar[bool] = ContextVar("fpipe.tracing", default=False)


@contextmanager
def _without_saving() -> Iterator[None]:
    pairs: list[Any] = []
    while (top := _autograd._top_saved_tensors_default_hooks(False)) is not None:
        pairs.append(top)
        _autograd._pop_saved_tensors_default_hooks()
    disabled = _autograd._saved_tensors_hooks_get_disabled_error_message()
    if disabled is not None:  # as torch.func.grad does
        _autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        if disabled is not None:
            _autograd._saved_tensors_hooks_disable(disabled)
        for pair in reversed(pairs):
            _autograd._push_saved_tensors_default_hooks(*pair)


@contextmanager
def _with_own_cache() -> Iterator[None]:
    # It is one for all threads, of which others may begin and end their use of it meanwhile.
    users, kept = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = 0, {}
    try:
        yield
    finally:
        parametrize._cache_enabled += users
        parametrize._cache = kept if parametrize._cache_enabled else {}
