"""Threefry2x32 with 20 rounds: the generator from which keys draw.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. All of it is
integer arithmetic in plain tensor operations, of which a draw takes 160. Traces and compilers would
be busy with little else, so a trace records them as one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

Word = TypeVar("Word", Tensor, int)

MASK: Final = 0xFFFFFFFF
"""Of the digits of a word."""

_PARITY: Final = 0x1BD11BDA
_ROTATIONS: Final = ((13, 15, 26, 6), (17, 29, 16, 24))

_WHOLE: ContextVar[bool] = ContextVar("fpipe.threefry.whole", default=False)


def threefry2x32(key: tuple[Word, Word], counter: tuple[Word, Word]) -> tuple[Word, Word]:
    """Threefry2x32 with 20 rounds, element by element.

    Args:
        key: two words: int64 tensors, or integers, from 0 to 2³²−1.
        counter: two words of the same kind; tensors broadcast.

    Returns:
        Two words.
    """
    # torch.compile looks into no context, and traces what it compiles by itself.
    if not torch.compiler.is_dynamo_compiling() and _WHOLE.get() and isinstance(key[0], Tensor):
        made: tuple[Word, Word] = torch.ops.fpipe.threefry2x32(*key, *counter)
        return made
    return written_out(*key, *counter)


def written_out(k0: Word, k1: Word, c0: Word, c1: Word) -> tuple[Word, Word]:
    """The same of the words one by one, whatever the context."""
    schedule: tuple[Word, Word, Word] = (k0, k1, k0 ^ k1 ^ _PARITY)
    # Only the second word is rotated, so only that one must be free of carries: the first gathers
    # at most 26 of them, and the second is shifted to at most 61 bits, so nothing overflows.
    x0 = c0 + k0
    x1 = c1 + k1 & MASK
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << rotation | x1 >> 32 - rotation) ^ x0
            x1 = _held(x1 & MASK)
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + (group + 1) & MASK
    return x0 & MASK, x1


def _held(word: Word) -> Word:
    """The same word, as a value that Inductor computes once.

    It would otherwise write a word out at each of its uses, and those again, and take a minute over
    it. The view costs nothing: what it looks at is held in a register of the same loop.
    """
    if isinstance(word, Tensor):
        return word.as_strided(word.shape, word.stride())
    return word


# ── as one operation ────────────────────────────────────────────────────────────────────────────

_LIBRARY = torch.library.Library("fpipe", "FRAGMENT")
_LIBRARY.define(
    "threefry2x32(Tensor k0, Tensor k1, Tensor c0, Tensor c1) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.pointwise),
)
torch.library.impl(_LIBRARY, "threefry2x32", "CompositeExplicitAutograd")(written_out)


@contextmanager
def whole() -> Iterator[None]:
    """Within it Threefry of tensors is one operation, ``torch.ops.fpipe.threefry2x32``."""
    token = _WHOLE.set(True)
    try:
        yield
    finally:
        _WHOLE.reset(token)


@torch.library.register_fake("fpipe::threefry2x32", lib=_LIBRARY)
def _shapes(k0: Tensor, k1: Tensor, c0: Tensor, c1: Tensor) -> tuple[Tensor, Tensor]:
    shape = torch.broadcast_shapes(k0.shape, k1.shape, c0.shape, c1.shape)
    return k0.new_empty(shape), k0.new_empty(shape)


@torch.library.register_vmap("fpipe::threefry2x32", lib=_LIBRARY)
def _mapped(info: Any, dims: tuple[int | None, ...], *words: Tensor) -> tuple[Any, Any]:
    """The operation itself, with the mapped dimension first and the others where they were."""
    rank = max(word.dim() - (dim is not None) for word, dim in zip(words, dims, strict=True))

    def aligned(word: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return word
        first = word.movedim(dim, 0)
        return first.reshape(len(first), *(1,) * (rank + 1 - word.dim()), *first.shape[1:])

    made = torch.ops.fpipe.threefry2x32(*map(aligned, words, dims))
    return made, (0, 0)
