"""Writes that autograd does not see, recorded so that they leave the gradient as it was.

    v = norm.clone()
    with torch.no_grad():          # or: v.data.clamp_min_(eps)
        v.clamp_min_(eps)          # another value from now on, with the gradient of the one before

Losses make use of them. In a graph of pure operations such a write is one that returns the new
value and hands its cotangent to the old.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from fpipe import tree
from fpipe.stage.refusing.explain import Untraceable
from fpipe.stage.tracing.shared import carries_gradient

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_ITEMS = frozenset({"__setitem__", *(f"__i{name}__" for name in _OPERATORS)})

_OTHERWISE = frozenset({"detach_", "requires_grad_", "resize_", "resize_as_", "set_"})
"""Methods that change a tensor, and nothing in it."""

ASKED: Final = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in ("device", "dtype", "is_cpu", "is_cuda", "layout", "ndim", "shape")
        ),
        *(Tensor.dim, Tensor.is_complex, Tensor.is_floating_point, Tensor.numel, Tensor.size),
    }
)
"""What says of a tensor what no write changes, and returns none."""

_DETACHING = frozenset({Tensor.detach, torch.detach, Tensor.data.__get__})  # type: ignore[attr-defined]
_RENORMING = frozenset({F.embedding, F.embedding_bag})
_DETACHING_ITSELF = frozenset({Tensor.detach_, torch.detach_})


class UnseenWrites(TorchFunctionMode):
    """Within it a value that carries a gradient keeps it when it is written to unseen.

    That is by a method, within ``torch.no_grad()`` or by way of ``x.detach()`` or ``x.data``. And
    ``x.detach_()``, which is no operation, becomes one: a write, which reaches the views of `x`.
    Those that were made before keep their gradient in torch, and are not to be read any more.
    """

    def __init__(self) -> None:
        super().__init__()
        self._detached = WeakTensorKeyDictionary()  # tensor -> that of which it is the detached
        self._views = WeakTensorKeyDictionary()  # tensor -> that of which it is a view
        # What no gradient would come back to -> its version then, and why.
        self._left: MutableMapping[Tensor, tuple[int, Untraceable]] = WeakTensorKeyDictionary()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or what stands for it.

        Raises:
            Untraceable: it reads a view of what has been detached in place since, or what it has
                written to by way of which the gradient of what is written is lost.
        """
        options = kwargs or {}
        if func in ASKED:
            return func(*args, **options)
        seen = func not in _DETACHING and torch.is_grad_enabled()
        lost = self._left_of(args, options) if seen else None
        result = self._call(func, args, options)
        found = result if isinstance(result, tuple | list) else (result,)
        made = [value for value in found if isinstance(value, Tensor)]
        if made and lost is not None:
            raise lost
        for value in made:
            if value.requires_grad and value._is_view():
                self._views[value] = value._base
        return result

    def _left_of(self, args: tuple[Any, ...], options: dict[str, Any]) -> Untraceable | None:
        """Why one of these is not to be read any more."""
        for value in tree.flatten((args, options))[0] if self._left else ():
            if isinstance(value, Tensor) and value in self._left:
                version, why = self._left[value]
                # A write to the whole takes a view along, in torch too.
                if version == value._version:
                    return why
        return None

    def _call(
        self, func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        if func is torch.cosine_similarity:
            return _cosine_similarity(*args, **options)
        if func in _RENORMING:
            return self._embed(func, inspect.signature(func).bind(*args, **options))
        if func in _DETACHING_ITSELF and args[0].requires_grad:
            with torch.enable_grad():
                args[0].copy_(args[0].detach())
            for view, base in self._views.items():
                if base is args[0]:
                    self._left[view] = view._version, _left_behind()
            return args[0]
        if func in _DETACHING:
            result = func(*args, **options)
            self._detached[result] = self._detached.get(args[0], args[0])
            return result
        if not _writes(func):
            return func(*args, **options)
        seen = args[0]
        owner = self._detached.get(seen, seen)
        if not owner.requires_grad or (owner is seen and torch.is_grad_enabled()):
            result = func(*args, **options)
        else:
            result = self._write_unseen(func, owner, args, options)
        if torch.is_grad_enabled() and any(map(_carries, tree.flatten((args[1:], options))[0])):
            for value in (seen, seen._base if seen._is_view() else seen):
                if value in self._detached:
                    self._left.update(
                        {own: (own._version, _written_apart()) for own in (seen, value)}
                    )
        return result

    def _embed(self, func: Callable[..., Any], call: inspect.BoundArguments) -> Any:
        """An embedding, whose write to its table torch functions do not see."""
        call.apply_defaults()
        table, most = call.arguments["weight"], call.arguments["max_norm"]
        if most is not None and isinstance(table, Tensor) and table.requires_grad:
            read = (call.arguments["input"], most, call.arguments["norm_type"])
            with torch.no_grad():
                self._write_unseen(torch.embedding_renorm_, table, (table, *read), {})
            call.arguments["max_norm"] = None
        return func(*call.args, **call.kwargs)

    def _write_unseen(
        self,
        func: Callable[..., Any],
        owner: Tensor,
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Any:
        """Write to what carries a gradient, which it keeps."""
        seen = args[0]
        with torch.no_grad():
            written = seen.detach().clone()
            func(written, *args[1:], **options)
        try:
            with torch.enable_grad():
                owner.copy_(_Kept.apply(owner, written))
        except RuntimeError:  # it is a view that was made without gradients
            return func(*args, **options)
        return seen


class _Kept(torch.autograd.Function):
    """A new value in the place of an old one, with the gradient of that."""

    @staticmethod
    def forward(old: Tensor, new: Tensor) -> Tensor:
        return new.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return cotangent, None


def _left_behind() -> Untraceable:
    return Untraceable(
        "calls detach_() on a tensor and then reads a view made of it before",
        "that view would lose its gradient; say y = y.detach() instead",
    )


def _written_apart() -> Untraceable:
    return Untraceable(
        "writes what carries a gradient by way of x.detach() or x.data, and then reads that again",
        "it would get no gradient; write to a copy, y = x.detach().clone()",
    )


def _carries(value: Any) -> bool:
    return isinstance(value, Tensor) and carries_gradient(value)


def may_write(func: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Whether a call with these options may write to its arguments."""
    return _writes(func) or bool(options.get("inplace")) or "out" in options


def _writes(func: Callable[..., Any]) -> bool:
    """Whether it is a method of tensors that writes to its own."""
    name = getattr(func, "__name__", "")
    if getattr(Tensor, name, None) is not func and getattr(torch, name, None) is not func:
        return False
    return name in _ITEMS or (name[-1] == "_" != name[0] and name not in _OTHERWISE)


def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """`torch.cosine_similarity`, whose write torch functions do not see."""
    dtype = torch.result_type(x1, x2)
    x1, x2 = torch.broadcast_tensors(x1.to(dtype), x2.to(dtype))
    return (_unit(x1, dim, eps) * _unit(x2, dim, eps)).sum(dim)


def _unit(x: Tensor, dim: int, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
    # The bound has no gradient of its own: below it that of the norm stays what it is.
    return x / torch.where(norm < eps, eps + (norm - norm.detach()), norm)
