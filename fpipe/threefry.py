"""Threefry2x32 with 20 rounds: the generator from which keys draw.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. All of it is
integer arithmetic, in about 160 plain tensor operations. They are one operation of torch's, so that
traces and compilers are not busy with little else; and on the CPU it goes through memory in parts
that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

Word = TypeVar("Word", Tensor, int)

MASK: Final = 0xFFFFFFFF
"""Of the digits of a word."""

_PARITY: Final = 0x1BD11BDA
_ROTATIONS: Final = ((13, 15, 26, 6), (17, 29, 16, 24))

_PART: Final = 1 << 15
"""Elements that a thread computes at once: their words are held by a cache of a megabyte."""


def threefry2x32(key: tuple[Word, Word], counter: tuple[Word, Word]) -> tuple[Word, Word]:
    """Threefry2x32 with 20 rounds, element by element.

    Args:
        key: two words: int64 tensors, or integers, from 0 to 2³²−1.
        counter: two words of the same kind; tensors broadcast.

    Returns:
        Two words.
    """
    # torch.compile makes one loop of the plain operations, and torch.export a program for others.
    if isinstance(key[0], Tensor) and not torch.compiler.is_compiling():
        made: tuple[Word, Word] = torch.ops.fpipe.threefry2x32(*key, *counter)
        return made
    return written_out(*key, *counter)


def written_out(k0: Word, k1: Word, c0: Word, c1: Word) -> tuple[Word, Word]:
    """The same of the words one by one, in plain operations."""
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


# ── the operation ───────────────────────────────────────────────────────────────────────────────

_LIBRARY = torch.library.Library("fpipe", "FRAGMENT")
_LIBRARY.define(
    "threefry2x32(Tensor k0, Tensor k1, Tensor c0, Tensor c1) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.pointwise),
)
torch.library.impl(_LIBRARY, "threefry2x32", "CompositeExplicitAutograd")(written_out)


@torch.library.impl(_LIBRARY, "threefry2x32", "CPU")
def _on_cpu(k0: Tensor, k1: Tensor, c0: Tensor, c1: Tensor) -> tuple[Tensor, Tensor]:
    """Part by part."""
    made = _shapes(k0, k1, c0, c1)
    part = _PART * torch.get_num_threads()
    _fill(made, [word.expand(made[0].shape) for word in (k0, k1, c0, c1)], part)
    return made


def _fill(made: Sequence[Tensor], words: Sequence[Tensor], part: int) -> None:
    """Write the results of `words`, which are all of one shape, without copies of them."""
    shape, count = made[0].shape, made[0].numel()
    if count <= part:
        k0, k1, c0, c1 = words
        for place, value in zip(made, _in_place(k0, k1, c0 + k0, c1 + k1), strict=True):
            place.copy_(value)
        return
    dim = next(dim for dim, size in enumerate(shape) if size > 1)
    rows = max(1, part * shape[dim] // count)
    for start in range(0, shape[dim], rows):
        size = min(rows, shape[dim] - start)
        places, taken = (
            [each.narrow(dim, start, size) for each in group] for group in (made, words)
        )
        _fill(places, taken, part)


def _in_place(k0: Tensor, k1: Tensor, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
    """The words of a key and of a counter to which it is added, which are written over."""
    schedule = (k0, k1, k0 ^ k1 ^ _PARITY)
    x1.bitwise_and_(MASK)
    turned = torch.empty_like(x1)
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0.add_(x1)
            torch.bitwise_left_shift(x1, rotation, out=turned)
            x1.bitwise_right_shift_(32 - rotation).bitwise_or_(turned)
            x1.bitwise_xor_(x0).bitwise_and_(MASK)
        x0.add_(schedule[(group + 1) % 3])
        x1.add_(schedule[(group + 2) % 3]).add_(group + 1).bitwise_and_(MASK)
    return x0.bitwise_and_(MASK), x1


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
