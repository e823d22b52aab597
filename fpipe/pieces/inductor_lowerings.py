"""How Inductor writes the operations of fpipe's own into its loops.

An operation of a graph stays one until a loop is written: written out before, a draw from a key
would be 160 operations, of which each takes Inductor longer than the machine a million.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fpipe.random.threefry import written_out


@functools.cache
def register() -> None:
    """Tell Inductor, once."""
    from torch._inductor.lowering import make_pointwise, register_lowering

    first, second = (make_pointwise(_word(number)) for number in range(2))

    def lowered(*words: Any) -> tuple[Any, Any]:
        return first(*words), second(*words)

    register_lowering(
        torch.ops.fpipe.threefry2x32.default, broadcast=True, type_promotion_kind=None
    )(lowered)


def _word(number: int) -> Callable[..., Any]:
    """The function of four words that gives one of the two."""

    def word(*words: Any) -> Any:
        lanes: Any = map(_Lane, words)
        made: Any = written_out(*lanes)
        return made[number].value

    return word


class _Lane:
    """A word of 64 bits of a loop that is being written."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def _with(self, name: str, other: Any) -> _Lane:
        from torch._inductor.virtualized import ops

        value = other.value if isinstance(other, _Lane) else ops.constant(other, torch.int64)
        return _Lane(getattr(ops, name)(self.value, value))

    __add__ = functools.partialmethod(_with, "add")
    __and__ = functools.partialmethod(_with, "bitwise_and")
    __or__ = functools.partialmethod(_with, "bitwise_or")
    __xor__ = functools.partialmethod(_with, "bitwise_xor")
    __lshift__ = functools.partialmethod(_with, "bitwise_left_shift")
    __rshift__ = functools.partialmethod(_with, "bitwise_right_shift")
