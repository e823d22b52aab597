"""The keys of a step: every microbatch, and every stage of it, draws from a key of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fpipe.errors import BatchError
from fpipe.random.key_tensors import check_key, unwrapped
from fpipe.random.threefry import threefry2x32

Words = tuple[int, int]
"""A key as two integers."""


def read_key(key: Any, *, wanted: bool, replica: int | None = None) -> Words | None:
    """The caller's key, checked.

    Args:
        key: as it was passed, None for none.
        wanted: whether any stage reads a key.
        replica: the number of the replica, which is folded in; None without replicas.

    Raises:
        BatchError: a key is missing, or nobody reads it.
        FpipeError: it is no key.
    """
    if not wanted:
        if key is not None:
            raise BatchError(
                "key is given, but nothing reads it: declare who does, fpipe.Stage(fn, "
                "reads_key=True), or has_key=True for one function or a module; or leave key out"
            )
        return None
    if key is None:
        raise BatchError("key=None, but the stages read a key: pass key=fpipe.random.key(seed)")
    check_key(key)
    if key.is_meta or isinstance(key, FakeTensor):
        raise BatchError(
            "key has a shape and no numbers, as on the meta device: make it elsewhere, or under "
            'torch.device("cpu")'
        )
    unmapped = unwrapped(key)
    if unmapped is None:
        raise BatchError(
            "key is mapped by a transform of torch.func, but all that a step computes at once has "
            "one key: fold the number of a member into it within a stage; of what draws by itself, "
            'as dropout in a module does, say randomness="different" and pass one key'
        )
    first, second = unmapped.tolist()
    return (first, second) if replica is None else threefry2x32((first, second), (0, replica))


def as_number(words: Words | None) -> int:
    """A key as one signed integer of 64 bits, 0 for none."""
    if words is None:
        return 0
    number = words[0] << 32 | words[1]
    return number - (1 << 64) if number >> 63 else number


def keys_of(
    words: Words, places: Sequence[tuple[int, int]], device: torch.device
) -> Sequence[Tensor]:
    """The keys of microbatches, and of stages or draws, as `fpipe.random.fold_in` makes them.

    Args:
        words: the caller's key.
        places: the microbatch of each, and the number of the stage or of the draw; that is -1 for
            the key of the microbatch itself.
        device: where they are read.
    """
    folded: dict[int, Words] = {}
    derived: list[Words] = []
    for microbatch, number in places:
        if microbatch not in folded:
            folded[microbatch] = threefry2x32(words, (0, microbatch))
        microbatch_words = folded[microbatch]
        derived.append(
            microbatch_words if number < 0 else threefry2x32(microbatch_words, (0, number))
        )
    # Made on the CPU, so that nobody waits until the device has done what was asked of it before.
    keys = torch.tensor(derived, dtype=torch.int64, device="cpu")
    return keys.to(device, non_blocking=True).unbind()
