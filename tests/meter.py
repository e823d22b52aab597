"""Bytes that uncompiled code holds, op by op."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe import pytree


class Meter(TorchDispatchMode):
    """Counts the storages that are alive after each op.

    Attributes:
        peak: most bytes held after an op beyond those of `inputs`, of which any may have gone.
    """

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._seen: dict[StorageWeakRef, int] = {}
        self._note(inputs)
        self._start = self._alive()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(leaf for leaf in pytree.flatten(result)[0] if isinstance(leaf, Tensor))
        self.peak = max(self.peak, self._alive() - self._start)
        return result

    def _note(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._seen[StorageWeakRef(storage)] = storage.nbytes()

    def _alive(self) -> int:
        self._seen = {ref: size for ref, size in self._seen.items() if not ref.expired()}
        return sum(self._seen.values())
