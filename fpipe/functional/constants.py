"""What is a constant to plain autograd is one to forward mode too.

Plain autograd, differentiated twice, takes what was computed within ``torch.no_grad()`` for a
constant in both derivatives. Forward mode does not look at the grad mode. Here it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fpipe.checks.explain import Untraceable
from fpipe.torch_internals import functorch

_DATA: Final = Tensor.data.__get__  # type: ignore[attr-defined]


class Constants(TorchFunctionMode):
    """Within it what is computed while gradients are disabled has no derivative in a direction."""

    def __init__(self) -> None:
        super().__init__()
        self._outside = _derivatives()
        self._data: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`.

        Raises:
            Untraceable: the function takes a derivative in a direction itself, without gradients.
        """
        options = kwargs or {}
        if func == _DATA:
            self._data.append(func(*args, **options))
            return self._data[-1]
        with self._forward_mode():
            return func(*args, **options)

    def _forward_mode(self) -> AbstractContextManager[Any]:
        if torch.is_grad_enabled():
            return nullcontext()
        if _derivatives() > self._outside + 1:
            raise Untraceable(
                "takes a derivative in a direction within torch.no_grad()",
                "in a derivative of the pipeline it would be a constant of one derivative and not "
                "of the other; take it outside of no_grad, and detach it",
            )
        return forward_ad._set_fwd_grad_enabled(False)

    def check(self) -> None:
        """Refuse what forward mode does not follow.

        Raises:
            Untraceable: a tensor was written to by way of ``x.data``.
        """
        if any(data._version for data in self._data):
            raise Untraceable(
                "writes to x.data within a derivative in a direction or a second derivative",
                "forward mode does not follow it; write to a copy, x.detach().clone()",
            )


def _derivatives() -> int:
    """How many derivatives in a direction are being taken."""
    levels = functorch.get_interpreter_stack() or []
    return sum(level.key() == functorch.TransformType.Jvp for level in levels)
