"""A trace is of the function alone, whatever its caller has put around the call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.modules.module as modules
import torch.nn.utils.parametrize as parametrize
from torch._C import _autograd


@contextmanager
def apart() -> Iterator[None]:
    """Within it nothing of the caller's is called or filled that is not about what is traced.

    Those are hooks on saved tensors, such as `torch.utils.checkpoint` has around what it calls;
    hooks of all modules, such as torch's counter of FLOPs has; and the cache of parametrized
    tensors, which would hold abstract ones from then on.
    """
    with _without_saving(), _without_global_hooks(), _with_own_cache():
        yield


@contextmanager
def _without_saving() -> Iterator[None]:
    pairs: list[Any] = []
    while (top := _autograd._top_saved_tensors_default_hooks(False)) is not None:
        pairs.append(top)
        _autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(pairs):
            _autograd._push_saved_tensors_default_hooks(*pair)


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    # Other dicts, for a handle of a hook holds on to the one that the hook is in.
    kinds = ("_global_forward_pre_hooks", "_global_forward_hooks")
    before = {kind: getattr(modules, kind) for kind in kinds}
    for kind in kinds:
        setattr(modules, kind, OrderedDict())
    try:
        yield
    finally:
        for kind, hooks in before.items():
            setattr(modules, kind, hooks)


@contextmanager
def _with_own_cache() -> Iterator[None]:
    before = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = 0, {}
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = before
