"""Threefry2x32 with 20 rounds: the generator from which keys draw.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. It is about
160 plain tensor operations on integers, registered as one custom operation, so that traces stay
short and compile quickly. On the CPU the operation works through memory in chunks that stay in the
cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

Word = TypeVar("Word", Tensor, int)

MASK: Final = 0xFFFFFFFF
"""The 32 binary digits of a word."""

_PARITY: Final = 0x1BD11BDA
_ROTATIONS: Final = ((13, 15, 26, 6), (17, 29, 16, 24))

_CHUNK: Final = 1 << 15
"""Elements that a thread computes at once: a cache of one megabyte holds their words."""


def threefry2x32(key: tuple[Word, Word], counter: tuple[Word, Word]) -> tuple[Word, Word]:
    """Apply Threefry2x32 with 20 rounds, element by element.

    Args:
        key: two words: int64 tensors, or integers, from 0 to 2³²−1.
        counter: two words of the same kind; tensors broadcast.

    Returns:
        Two words.
    """
    # torch.compile fuses the plain operations into one loop, and torch.export needs no fpipe then.
    if isinstance(key[0], Tensor) and not torch.compiler.is_compiling():
        words: tuple[Word, Word] = torch.ops.fpipe.threefry2x32(*key, *counter)
        return words
    return written_out(*key, *counter)


def written_out(k0: Word, k1: Word, c0: Word, c1: Word) -> tuple[Word, Word]:
    """The same function in plain operations, on the four words one by one."""
    schedule: tuple[Word, Word, Word] = (k0, k1, k0 ^ k1 ^ _PARITY)
    # Only the second word is rotated, so only that word must be free of carries. The first gathers
    # at most 26 carries, and the second is shifted to at most 61 bits: nothing overflows.
    x0 = c0 + k0
    x1 = c1 + k1 & MASK
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << rotation | x1 >> 32 - rotation) ^ x0
            x1 = _as_view(x1 & MASK)
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + (group + 1) & MASK
    return x0 & MASK, x1


def _as_view(word: Word) -> Word:
    """The same word, as a value that Inductor computes once.

    Otherwise Inductor inlines each word at all of its uses, and compiles for a minute. The view
    costs nothing: the word stays in a register of the same loop.
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
    """Compute chunk by chunk."""
    outputs = _fake(k0, k1, c0, c1)
    chunk = _CHUNK * torch.get_num_threads()
    _fill(outputs, [word.expand(outputs[0].shape) for word in (k0, k1, c0, c1)], chunk)
    return outputs


def _fill(outputs: Sequence[Tensor], words: Sequence[Tensor], chunk: int) -> None:
    """Write the results to `outputs`; the four `words` have their shape, and are not copied."""
    shape, count = outputs[0].shape, outputs[0].numel()
    if count <= chunk:
        k0, k1, c0, c1 = words
        results = _overwriting(k0, k1, c0 + k0, c1 + k1)
        for output, result in zip(outputs, results, strict=True):
            output.copy_(result)
        return
    dim = next(dim for dim, size in enumerate(shape) if size > 1)
    rows = max(1, chunk * shape[dim] // count)
    for start in range(0, shape[dim], rows):
        size = min(rows, shape[dim] - start)
        some_outputs, some_words = (
            [each.narrow(dim, start, size) for each in group] for group in (outputs, words)
        )
        _fill(some_outputs, some_words, chunk)


def _overwriting(k0: Tensor, k1: Tensor, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
    """The rounds, in place of `x0` and `x1`: the words of the counter plus those of the key."""
    schedule = (k0, k1, k0 ^ k1 ^ _PARITY)
    x1.bitwise_and_(MASK)
    shifted = torch.empty_like(x1)
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0.add_(x1)
            torch.bitwise_left_shift(x1, rotation, out=shifted)
            x1.bitwise_right_shift_(32 - rotation).bitwise_or_(shifted)
            x1.bitwise_xor_(x0).bitwise_and_(MASK)
        x0.add_(schedule[(group + 1) % 3])
        x1.add_(schedule[(group + 2) % 3]).add_(group + 1).bitwise_and_(MASK)
    return x0.bitwise_and_(MASK), x1


@torch.library.register_fake("fpipe::threefry2x32", lib=_LIBRARY)
def _fake(k0: Tensor, k1: Tensor, c0: Tensor, c1: Tensor) -> tuple[Tensor, Tensor]:
    shape = torch.broadcast_shapes(k0.shape, k1.shape, c0.shape, c1.shape)
    return k0.new_empty(shape), k0.new_empty(shape)


@torch.library.register_vmap("fpipe::threefry2x32", lib=_LIBRARY)
def _vmap(info: Any, dims: tuple[int | None, ...], *words: Tensor) -> tuple[Any, Any]:
    """Move the mapped dimension to the front, and leave the others where they were."""
    rank = max(word.dim() - (dim is not None) for word, dim in zip(words, dims, strict=True))

    def aligned(word: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return word
        first = word.movedim(dim, 0)
        return first.reshape(len(first), *(1,) * (rank + 1 - word.dim()), *first.shape[1:])

    return torch.ops.fpipe.threefry2x32(*map(aligned, words, dims)), (0, 0)
