"""The mode in which functions are recorded: plain autograd above, operations without writes below.

    the user's function ──► autograd ──► Functional ──► a graph of pure operations

It is what AOTAutograd records in. Writes to intermediate values become new values, views of them
are made anew, and autograd, which runs above, sees the program as it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fpipe.checks.explain import Untraceable
from fpipe.torch_internals import (
    FakeTensor,
    FunctionalTensor,
    FunctionalTensorMode,
    functionalized,
    functorch,
)

_PLAIN: Final[dict[Any, bool]] = {}
_TYPES: Final = frozenset({Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor})
_DENSE: Final = (Tensor, torch.nn.Parameter)
# To FunctionalTensorMode an operation with effects, whose order it would keep by tokens.
_CHECKS: Final = torch.ops.aten._linalg_check_errors.default


class Functional(FunctionalTensorMode):
    """Functionalization beneath autograd.

    Operations that write to nothing and return new tensors, which most do, take a short way. What
    is detached is another tensor to autograd, and the same here: no operation is recorded.

    Args:
        name: how to call a tensor that the function closes over, in messages.
    """

    def __init__(self, name: Callable[[Tensor], str]) -> None:
        super().__init__()
        self._name = name
        self._held = WeakIdKeyDictionary()  # a closed-over tensor -> what stands for it here
        self._origin = WeakIdKeyDictionary()  # its alias in the graph -> the closed-over tensor

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # tracing is kept from Dynamo as a whole

    def original(self, value: Tensor) -> Tensor:
        """The tensor that the function closes over, of which the graph has an alias."""
        return self._origin.get(value, value)

    def made_functional(self, value: Tensor) -> Tensor:
        """A value that is not functional yet, or what stands here for one that is closed over."""
        if type(value) in _DENSE:
            held: Tensor = self._wrapped(value, None)
            return held
        functional: Tensor = self._outer(value)
        return functional

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record a call of `func` without its writes."""
        options = dict(kwargs or {})
        if not _TYPES.issuperset(types):
            return super().__torch_dispatch__(func, types, args, options)
        if func is _CHECKS:
            return None
        if func is _DEVICE:
            return _inner(args[0]).device
        args, options = self._wrapped((tuple(args), options), func)
        if func is _DETACH and isinstance(args[0], FunctionalTensor):
            return FunctionalTensor(args[0].elem, self)
        if not _is_plain(func):
            if func in _VIEWS and isinstance(args[0], FunctionalTensor):
                return self._view(func, args, options)
            if torch.Tag.inplace_view in func.tags:
                self._part(args[0])
            return super().__torch_dispatch__(func, types, args, options)
        args, options = _inner((args, options))
        return self._outer(func(*args, **options))

    def _view(self, func: Any, args: Any, options: Any) -> FunctionalTensor:
        """A view of a functional tensor, which is made anew when what it views is written to."""
        value, *rest = args
        with functionalized():
            viewed = func._op_dk(_FUNCTIONALIZE, value.elem, *rest, **options)
        view = FunctionalTensor(viewed, self)
        torch._functionalize_unsafe_set(view, value)
        return view

    def _part(self, value: FunctionalTensor) -> None:
        """Let a tensor whose shape changes in place be none that what is detached shares."""
        value.elem = super().__torch_dispatch__(_DETACH, (FunctionalTensor,), (value,)).elem

    def _wrapped(self, value: Any, func: Any) -> Any:
        """Arguments with what is closed over made functional too: it may be written to later."""
        if isinstance(value, Tensor):
            if type(value) not in _DENSE or value.layout is not torch.strided:
                return value
            held = self._held.get(value)
            if held is None:
                self._check(value, func)
                alias = value.detach()
                self._origin[alias] = value
                held = self._held[value] = self._outer(alias)
            return held
        if type(value) in (tuple, list):
            return type(value)(self._wrapped(item, func) for item in value)
        if type(value) is dict:
            return {name: self._wrapped(item, func) for name, item in value.items()}
        return value

    def _check(self, value: Tensor, func: Any) -> None:
        # Transforms have been here before: this belongs to one that the trace does not know.
        if functorch.is_functorch_wrapped_tensor(value):
            raise Untraceable(
                "closes over a tensor that a transform of torch.func maps or differentiates",
                "pass it in the parameters or in the batch, where transforms can see it",
            )
        if value.requires_grad and torch.is_grad_enabled() and func is not _DETACH:
            raise Untraceable(
                f"closes over a tensor that requires grad ({self._name(value)}, shape "
                f"{tuple(value.shape)})",
                "it would get no gradient; pass it in the parameters "
                "(torch.func.functional_call does so for a module; what the loss of from_module "
                "trains belongs into the module, whose forward computes with it), or detach it",
            )

    def _outer(self, value: Any) -> Any:
        if isinstance(value, FunctionalTensor):
            return value  # torch 2.11 has some operations return what they were given
        if isinstance(value, Tensor):
            return FunctionalTensor(torch._to_functional_tensor(value), self)
        if isinstance(value, list | tuple):
            return type(value)(map(self._outer, value))
        return value


_DETACH: Final = torch.ops.aten.detach.default
_DEVICE: Final = torch.ops.prim.device.default
_FUNCTIONALIZE: Final = torch._C.DispatchKey.Functionalize
_VIEWS: Final = frozenset(
    {
        torch.ops.aten.diagonal.default,
        torch.ops.aten.expand.default,
        torch.ops.aten.permute.default,
        torch.ops.aten.select.int,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.squeeze.dim,
        torch.ops.aten.squeeze.dims,
        torch.ops.aten.t.default,
        torch.ops.aten.transpose.int,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten.view.default,
    }
)
"""Operations that return one view of their first argument, the only tensor among them."""


def _inner(value: Any) -> Any:
    if isinstance(value, FunctionalTensor):
        torch._sync(value)
        return torch._from_functional_tensor(value.elem)
    if type(value) in (tuple, list):
        return type(value)(map(_inner, value))
    if type(value) is dict:
        return {name: _inner(item) for name, item in value.items()}
    return value


def _is_plain(func: Any) -> bool:
    """Whether an operation returns new tensors alone, and writes to none."""
    known = _PLAIN.get(func)
    if known is None:
        known = _PLAIN[func] = (
            isinstance(func, torch._ops.OpOverload)
            and func.namespace in ("aten", "fpipe")
            and bool(func._schema.returns)
            and not any(a.alias_info for a in (*func._schema.arguments, *func._schema.returns))
            and func not in FunctionalTensor.metadata_fns
            and "lift" not in func.name()
            and "_to_copy" not in func.name()
            and not torch._C._dispatch_has_kernel_for_dispatch_key(
                func.name(), "CompositeImplicitAutograd"
            )
        )
    return known
