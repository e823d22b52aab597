"""Receive buffers that are kept from step to step."""

from __future__ import annotations

import sys
from collections import defaultdict

import torch
from torch import Tensor

from fpipe.shapes import Spec


class Buffers:
    """Lends tensors of given shapes, and takes one back when nothing else refers to it any more.

    Nobody says when a value that was received is no longer used: it may live on as the view that a
    stage returned. So a buffer is free when this pool holds the only reference to its storage.

    Args:
        device: where the buffers lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[Spec, list[Tensor]] = defaultdict(list)

    def take(self, spec: Spec) -> Tensor:
        """A contiguous tensor with arbitrary contents."""
        kept = self._kept[spec]
        for index in range(len(kept)):
            if _only_here(kept, index):
                # The least recently lent is tried first: it is the likeliest to be free.
                kept.append(kept.pop(index))
                return kept[-1]
        kept.append(torch.empty(spec.shape, dtype=spec.dtype, device=self._device))
        return kept[-1]

    def clear(self) -> None:
        """Give all buffers up, such as those that a broken connection may still write to."""
        self._kept.clear()


def _only_here(kept: list[Tensor], index: int) -> bool:
    """Whether the list alone refers to its tensor, and the tensor alone to its storage."""
    references = sys.getrefcount(kept[index]) - 1  # less the argument of getrefcount itself
    storage = kept[index].untyped_storage()
    # Two for the storage: the tensor's, and that of the Python object made to ask.
    return references == 1 and torch._C._storage_Use_Count(storage._cdata) <= 2
