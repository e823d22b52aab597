"""Receive buffers that are kept from one step to the next."""

from __future__ import annotations

import sys
from collections import defaultdict

import torch
from torch import Tensor

from fpipe.inputs.signature import Spec


class Buffers:
    """Lends tensors of given shapes, and takes one back when nothing else refers to its memory.

    Nobody says when a value that was received is no longer used: it may live on as the view that a
    stage returned, or in the autograd graph of the caller, whose references Python does not count.
    So the pool lends an alias, a new tensor on memory that the pool owns, and counts the references
    to that memory.

    Args:
        device: where the buffers lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[Spec, list[Tensor]] = defaultdict(list)
        self._lent: set[Spec] = set()
        self._alone = _references(torch.empty(1, device=device))

    def take(self, spec: Spec) -> Tensor:
        """A contiguous tensor with arbitrary contents."""
        self._lent.add(spec)
        kept = self._kept[spec]
        for index, buffer in enumerate(kept):
            if _references(buffer) == self._alone:
                # The least recently lent is tried first: it is the likeliest to be free.
                kept.append(kept.pop(index))
                return buffer.detach()
        with torch.inference_mode(False):  # it outlives the step, and its mode
            kept.append(torch.empty(spec.shape, dtype=spec.dtype, device=self._device))
        return kept[-1].detach()

    def settle(self) -> None:
        """At the end of a step, give up those of other shapes than were lent in it.

        Where lengths change from batch to batch there is no end of shapes.
        """
        for spec in self._kept.keys() - self._lent:
            del self._kept[spec]
        self._lent.clear()

    def clear(self) -> None:
        """Give all buffers up, such as those that a broken connection may still write to."""
        self._kept.clear()
        self._lent.clear()


def _references(tensor: Tensor) -> tuple[int, int]:
    """How many tensors refer to the memory of `tensor`, and how many names to it as a storage."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)
