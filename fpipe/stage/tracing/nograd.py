"""The grad mode that functions are recorded in, and what is kept of their own.

A graph of operations does not tell within which grad mode they ran, and its derivative is taken
later. So what is computed within ``torch.no_grad()`` is recorded as detached, and ``x.data`` too,
which is no operation at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.func import vjp
from torch.overrides import TorchFunctionMode

from fpipe import tree
from fpipe.arguments.shapes import is_differentiable
from fpipe.stage.foreign.custom import CALL, Calls, recording_calls
from fpipe.stage.seeing import Seeing
from fpipe.stage.tracing.shared import SharedMemory
from fpipe.stage.tracing.unseen import ASKED, may_write

T = TypeVar("T")

_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


@contextmanager
def with_gradients() -> Iterator[None]:
    """Within it functions can be differentiated, whatever the caller has disabled."""
    # To torch 2.11 inference mode means no derivatives even where gradients are enabled again.
    with torch.inference_mode(False), torch.enable_grad():
        yield


def undifferentiated(function: Callable[[], T]) -> T:
    """What `function` returns, recorded like one that is differentiated, by nothing.

    `functionalize` takes what a composite operation returns for a new value, also where it is its
    argument, as for ``x.type_as(x)``, so that a write to it would not reach that. Under a `vjp`
    composite operations are taken apart before.
    """
    result: Any = vjp(lambda nothing: (nothing, function()), torch.zeros(()), has_aux=True)
    return result[2]


@contextmanager
def keeping_detached(calls: Calls) -> Iterator[None]:
    """Within it operations are recorded so that what carries no gradient is seen to carry none.

    Args:
        calls: keeps the calls of Functions with a backward of their own.
    """
    with recording_calls(calls), _AsCalled(calls), _DetachWithoutGrad():
        yield


class _AsCalled(TorchFunctionMode):
    """What has to be known of calls, before they are operations.

    ``x.data`` becomes the operation ``x.detach()``. A view of a tensor that was updated in place is
    made anew when it is next read, in the grad mode of that moment. So the arguments of a call that
    is made while gradients are disabled are read beforehand with gradients, which they keep; and
    its results are read at once without, so that a later read cannot give them any. What carries
    none is detached before it is read, where its memory carries one. A Function with a backward of
    its own is recorded as one operation.
    """

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls
        self._memory = SharedMemory()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`."""
        if func in ASKED:
            return func(*args, **(kwargs or {}))
        if func == _DATA:
            return args[0].detach()
        if func is CALL:
            func = self._calls.record
        options = dict(kwargs or {})
        leaves, spec = tree.flatten((args, options))
        if torch.is_grad_enabled():
            deceiving = [leaf for leaf in leaves if self._memory.deceives(leaf)]
            if deceiving and may_write(func, options):
                with torch.no_grad():
                    for leaf in deceiving:
                        leaf.copy_(leaf.detach())
            elif deceiving:
                own = [_detached(v) if self._memory.deceives(v) else v for v in leaves]
                args, options = tree.unflatten(spec, own)
            result = func(*args, **options)
            self._memory.note((*leaves, *tree.flatten(result)[0]))
            return result
        with torch.enable_grad():
            tree.tree_map(_read, leaves)
        result = func(*args, **options)
        made = tree.flatten(result)[0]
        tree.tree_map(_read, made)
        self._memory.note_without(own for own in made if not any(own is leaf for leaf in leaves))
        return result


class _DetachWithoutGrad(Seeing):
    """Detaches what operations return while gradients are disabled.

    It stands below the transforms of `torch.func`, which hand down the grad mode that holds for
    those outside of them: so a gradient that is taken within is not lost, and is detached itself.
    """

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`."""
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() or func._schema.is_mutable:
            return result
        return tree.tree_map(_detached, result)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and is_differentiable(value) else value


def _read(value: Any) -> None:
    if isinstance(value, Tensor):
        value.clone()
