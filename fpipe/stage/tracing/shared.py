"""Memory that values with a gradient share with others that carry none.

    seen = v.detach()              # or a view of v, made within torch.no_grad()
    v.mul_(2)                      # seen has changed, and carries no gradient all the same

What is recorded makes such a value anew, of what is in that memory, when it is next read. It would
get a gradient then, for a graph of pure operations knows of no memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.utils.weak import WeakIdKeyDictionary

from fpipe.arguments.shapes import is_differentiable


class SharedMemory:
    """Knows, while a function is recorded, what memory holds values that carry a gradient."""

    def __init__(self) -> None:
        self._carrying: dict[int, Any] = {}  # kept, so that no other memory gets their number
        self._without = WeakIdKeyDictionary()

    def note(self, values: Iterable[Any]) -> None:
        """Remember where those of `values` lie that carry a gradient."""
        with _unheard():
            for value in values:
                if isinstance(value, Tensor) and carries_gradient(value):
                    made = _functional(value)
                    if made is not None:
                        memory = made.untyped_storage()
                        self._carrying[memory._cdata] = memory

    def note_without(self, values: Iterable[Any]) -> None:
        """Remember those of `values`, made without gradients, that say they require one.

        Views of what was updated in place do, though nothing comes back to them.
        """
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad and value.grad_fn is None:
                self._without[value] = True

    def deceives(self, value: Any) -> bool:
        """Whether `value` carries no gradient, and would get one of its memory when it is read."""
        if not self._carrying or not isinstance(value, Tensor):
            return False
        with _unheard():
            return self._hides(value)

    def _hides(self, value: Tensor) -> bool:
        if not is_differentiable(value):
            return False
        if carries_gradient(value) and not (value in self._without and value.grad_fn is None):
            return False
        made = _functional(value)
        if made is None or made.untyped_storage()._cdata not in self._carrying:
            return False
        written: bool = torch._functionalize_has_data_mutation(made)  # type: ignore[attr-defined]
        return written


_unheard = torch._C.DisableTorchFunction
"""Within it no mode hears what is asked of tensors: each would take longer than the answer."""


def carries_gradient(value: Tensor) -> bool:
    """Whether a value is differentiated by any transform of `torch.func` that it stands within."""
    while True:
        if value.requires_grad:
            return True
        if not _functorch.is_functorch_wrapped_tensor(value):
            return False
        value = _functorch.get_unwrapped(value)


def _functional(value: Tensor) -> Tensor | None:
    """The tensor beneath all other transforms that `torch.func.functionalize` has made."""
    while not torch._is_functional_tensor(value):
        if not _functorch.is_functorch_wrapped_tensor(value):
            return None
        value = _functorch.get_unwrapped(value)
    return value
