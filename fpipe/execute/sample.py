"""Check that all ranks were given the same data, by some of its numbers.

The rank that reads the inputs is seldom that which reads the labels. Where processes shuffle with
seeds of their own, labels are those of other inputs, and nothing but the loss would ever show it.
Nor would it if copies of a parameter that several ranks read, such as that of an embedding and a
head, began from seeds of their own: each is updated by the same gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import string_at
from typing import Final
from zlib import crc32

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.inputs.split_batch import SplitBatch

Sample = dict[str, tuple[float, ...]]
"""Some numbers of each leaf, by its path; none of one without data."""

_COUNT = 64
_SPREAD = 2654435761  # a prime: what is at these places does not lie in one column


ROUNDING: Final = 1e-2
"""How far numbers of a batch may lie apart, of the greatest of them."""

COPIED: Final = 1e-4
"""The same for copies of a parameter, whose updates have the same bits."""


def sample(batch: object) -> Sample:
    """Numbers from the same places of every batch of these shapes."""
    leaves, spec = pytree.flatten(batch)
    return dict(zip(pytree.paths(spec), map(numbers, leaves), strict=True))


def trace_of(parts: SplitBatch) -> int:
    """Tells a batch from that of another step, in a microsecond for each leaf on the CPU.

    It is made of the bytes with which the first microbatch begins and the last one ends. Ranks
    that have data in the same leaves have the same for the same batch; 0 where there is none.
    """
    held, checksum = 0, 0
    for leaf, (first, last) in enumerate(zip(parts.leaves[0], parts.leaves[-1], strict=False)):
        if leaf >= _LEAVES or not first.is_cpu or not last.is_cpu:
            continue
        held |= 1 << leaf
        if not first.nbytes or not last.nbytes:
            continue  # of a replica that has fewer rows than there are microbatches
        size = min(first.nbytes, _BYTES)
        checksum = crc32(string_at(first.data_ptr(), size), checksum)
        size = min(last.nbytes, _BYTES)
        checksum = crc32(string_at(last.data_ptr() + last.nbytes - size, size), checksum)
    return held << 32 | checksum if held else 0


_LEAVES: Final = 30
_BYTES: Final = 256


def same_numbers(traces: Sequence[int]) -> bool:
    """Whether those that are made of the same leaves are equal."""
    first: dict[int, int] = {}
    return all(first.setdefault(trace >> 32, trace) == trace for trace in traces)


def unlike(samples: Sequence[Sample | None], tolerance: float) -> tuple[str, int, int] | None:
    """The path of the first leaf in which two ranks differ by more than that, and the two.

    Args:
        samples: of each rank, None of one that was given nothing. Leaves that not all have are
            compared among those that do.
        tolerance: of the greatest number.
    """
    first: dict[str, tuple[int, tuple[float, ...]]] = {}
    for rank, leaves in enumerate(samples):
        for path, theirs in (leaves or {}).items():
            if not theirs:  # one has no data where only its shapes are asked for
                continue
            other, ours = first.setdefault(path, (rank, theirs))
            if not _close(ours, theirs, tolerance):
                return path, other, rank
    return None


def numbers(leaf: Tensor) -> tuple[float, ...]:
    """Some of a leaf, from places that depend on its size alone; none of one without data."""
    if leaf.is_meta or not leaf.numel():
        return ()
    with torch.no_grad():
        places = torch.arange(_COUNT, device=leaf.device) * _SPREAD % leaf.numel()
        chosen = leaf.detach().reshape(-1)[places]
        real = torch.view_as_real(chosen.resolve_conj()) if chosen.is_complex() else chosen
        return tuple(real.double().flatten().tolist())


def _close(ours: Sequence[float], theirs: Sequence[float], tolerance: float) -> bool:
    if ours == theirs or len(ours) != len(theirs):  # what one has split itself has another length
        return True
    a, b = torch.tensor([ours, theirs], dtype=torch.float64, device="cpu")
    scale = float(torch.cat([a, b]).nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(a, b, rtol=0, atol=tolerance * scale, equal_nan=True)
