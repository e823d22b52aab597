"""Name tensors that a function closes over as its user does, for messages."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from fpipe.checks.explain import Untraceable
from fpipe.torch_internals import functorch

_MOST = 2_000  # objects to look at: an error must not take long to write


def name_in_closure(value: Tensor, origin: Any) -> str:
    """The name by which a function reaches a tensor, the shortest way first.

    Looked through are what it closes over, its bound and default arguments, containers, modules,
    the attributes of objects, and functions that it may call.

    Args:
        value: the tensor.
        origin: the function, or several.

    Example:
        >>> weights = [torch.ones(2), torch.ones(2)]
        >>> name_in_closure(weights[1], lambda p, x: x * weights[1])
        "'weights[1]'"
    """
    names = (repr(name) for name, reached in _reached(origin) if reached is value)
    return next(names, "an unnamed tensor")


def refuse_mapped(origin: Any) -> None:
    """Refuse functions that close over tensors of a transform of `torch.func` around the trace.

    A trace stands outside of it, and its level might be taken for one of the trace's own.

    Raises:
        Untraceable: a function does.
    """
    for name, value in _reached(origin):
        if isinstance(value, Tensor) and functorch.is_functorch_wrapped_tensor(value):
            raise Untraceable(
                "closes over a tensor that a transform of torch.func maps or differentiates "
                f"({name!r})",
                "pass it in the parameters or in the batch, where transforms can see it",
            )


def _reached(origin: Any) -> Iterator[tuple[str, Any]]:
    """All objects that functions reach, each with a name, the shortest way first."""
    waiting: deque[tuple[str, Any]] = deque(("", one) for one in _several(origin))
    seen: set[int] = set()
    while waiting and len(seen) < _MOST:
        name, value = waiting.popleft()
        yield name, value
        if id(value) not in seen:
            seen.add(id(value))
            # A cell may be empty yet, and not every callable tells its signature.
            with suppress(TypeError, ValueError):
                waiting.extend(_within(name, value))


def _several(origin: Any) -> tuple[Any, ...]:
    return origin if isinstance(origin, tuple) else (origin,)


def _within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The objects within an object, each with its name."""
    if isinstance(value, Tensor | str | bytes | type | ModuleType):
        return
    if isinstance(value, partial):
        yield "", value.func
        bound = inspect.signature(value.func).bind_partial(*value.args, **value.keywords)
        yield from bound.arguments.items()
    elif isinstance(value, MethodType):
        yield "", value.__func__
        yield name or _of(value.__self__), value.__self__
    elif isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, torch.nn.Module):
        owner = name or type(value).__name__
        for path, tensor in chain(value.named_parameters(), value.named_buffers()):
            yield f"{owner}.{path}", tensor
        if not name:
            yield "", value.forward
    elif isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", item) for key, item in list(value.items()))
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{index}]", item) for index, item in enumerate(value))
    elif not inspect.isroutine(value):
        attributes = getattr(value, "__dict__", {})
        yield from ((f"{name or _of(value)}.{key}", item) for key, item in attributes.items())


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType) or (function.__module__ or "").startswith("torch."):
        return
    closure = inspect.getclosurevars(function)
    yield from closure.nonlocals.items()
    yield from closure.globals.items()
    defaults = inspect.signature(function).parameters.values()
    yield from ((p.name, p.default) for p in defaults if p.default is not p.empty)


def _of(value: Any) -> str:
    """A name for an object that has none."""
    return type(value).__name__
