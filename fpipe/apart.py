"""Calls of a pipeline within a function that `torch.compile` compiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def apart(method: Callable[P, R]) -> Callable[P, R]:
    """A method that `torch.compile` calls as it is: a graph ends before it and begins after it.

    What a pipeline runs is compiled already, stage by stage.
    """

    @wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            # Not at the top: torch.compile takes a second to import.
            outside: Callable[P, R] = torch._dynamo.disable(method)
            return outside(*args, **kwargs)
        return method(*args, **kwargs)

    return called
