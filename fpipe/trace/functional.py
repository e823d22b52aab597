"""The modes in which functions are recorded: plain autograd above, operations without writes below.

    the user's function ──► autograd ──► Functional ──► a graph of pure operations

It is what AOTAutograd records in. Writes to intermediate values become new values, views of them
are made anew, and autograd, which runs above, sees the program as it was written.

`Checked` refuses calls that torch refuses on real tensors, but not on abstract ones. Without it
the trace would succeed, and the first action of the step would fail, or compute another thing than
was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fpipe import pytree
from fpipe.checks.explain import Untraceable
from fpipe.checks.purity import WriteGuard
from fpipe.inputs.signature import memory_of
from fpipe.torch_internals import (
    FakeTensor,
    FunctionalTensor,
    FunctionalTensorMode,
    functionalized,
    functorch,
    is_composite,
)
from fpipe.trace.data_dependence import Known
from fpipe.trace.isolation import let_through
from fpipe.trace.overrides.standin import Seeing

_PLAIN: Final[dict[Any, bool]] = {}
_TYPES: Final = frozenset({Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor})
_DENSE: Final = (Tensor, torch.nn.Parameter)
# To FunctionalTensorMode an operation with effects, whose order it would keep by tokens.
_CHECKS: Final = torch.ops.aten._linalg_check_errors.default


class Functional(FunctionalTensorMode):
    """Functionalization beneath autograd.

    Operations that write to nothing and return new tensors, which most do, take a short way. A
    detached value or an alias is another tensor to autograd, and the same here: no operation is
    recorded. Nor is what forward mode asks of a tangent.

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
        if func in _IDENTITIES and isinstance(args[0], FunctionalTensor):
            return FunctionalTensor(args[0].elem, self)
        if func in _COMPARISONS:
            return _COMPARISONS[func](*map(_inner, args))
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
_IDENTITIES: Final = frozenset({_DETACH, torch.ops.aten.alias.default})
_COMPARISONS: Final[dict[Any, Callable[[Tensor, Tensor], bool]]] = {
    torch.ops.aten.is_same_size.default: lambda one, other: one.shape == other.shape,
    torch.ops.aten._has_same_storage_numel.default: lambda one, other: (
        one.untyped_storage().nbytes() // one.itemsize
        == other.untyped_storage().nbytes() // other.itemsize
    ),
}
"""Questions about sizes, as torch answers them."""
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
            and not is_composite(func)
        )
    return known


aten = torch.ops.aten

_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.mv.default, aten.addmv.default})
"""Products whose dtypes torch does not compare on abstract tensors; it does for all others."""


_OF_TARGETS = frozenset({aten.nll_loss_forward.default, aten.nll_loss2d_forward.default})
"""Losses whose targets are numbers of classes, in what cross entropy comes to."""


class Checked(Seeing):
    """Refuses wrong dtypes of products and labels, writes that overlap, views beyond the memory.

    Products and targets raise `RuntimeError`, as in torch, and the others are `Untraceable`. It is
    one mode for all that looks at an operation: to go from one mode to the next takes longer.

    Args:
        known: runs each operation, unless it knows the answer.
        guard: refuses writes to what the function does not own; None for its backward.
    """

    def __init__(self, known: Known, guard: WriteGuard | None = None) -> None:
        super().__init__()
        self._known, self._guard = known, guard

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Check the arguments of `func`, then call it."""
        if func.namespace != "prim":  # C++ asks for a device where nothing may be raised
            let_through()
        options = kwargs or {}
        if func in _PRODUCTS:
            _check_dtypes(func, pytree.flatten((args, dict(options)))[0])
        elif func in _OF_TARGETS:
            _check_target(args[1])
        elif func is aten.as_strided.default:
            _check_reach(*args, **options)
        elif func._schema.is_mutable and torch.Tag.inplace_view not in func.tags:
            _check_overlap(func, args, options)
        if self._guard is None:
            return self._known(func, args, options)
        return self._guard(func, args, options, self._known)


def _check_dtypes(func: torch._ops.OpOverload, leaves: Iterable[Any]) -> None:
    dtypes = dict.fromkeys(leaf.dtype for leaf in leaves if isinstance(leaf, Tensor))
    if len(dtypes) > 1:
        names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise RuntimeError(
            f"{func} multiplies or adds {names}: give the parameters and the batch one "
            "dtype, or convert one of them with .to()"
        )


def _check_target(target: Tensor) -> None:
    if target.dtype not in (torch.int64, torch.uint8):
        name = str(target.dtype).removeprefix("torch.")
        raise RuntimeError(
            f"the labels of a cross entropy are {name}: numbers of classes must be int64, as "
            "labels.long() makes them"
        )


def _check_reach(
    value: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> None:
    start = value.storage_offset() if offset is None else offset
    end = start + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    room = value.untyped_storage().nbytes() // value.itemsize
    if 0 not in size and room and not 0 <= start <= end < room:
        raise Untraceable(
            f"takes as_strided({list(size)}, {list(stride)}, {start}) of a value of shape "
            f"{tuple(value.shape)} beyond its memory",
            "take it of the whole value, or index it",
        )


def _check_overlap(
    func: torch._ops.OpOverload, args: Sequence[Any], options: Mapping[str, Any]
) -> None:
    declared = func._schema.arguments
    pairs = [*zip(declared, args, strict=False)]
    pairs += [
        (argument, options[argument.name]) for argument in declared if argument.name in options
    ]
    dense = [
        (argument.is_write, value)
        for argument, value in pairs
        if isinstance(value, Tensor) and value.layout == torch.strided
    ]
    for written in (value for is_write, value in dense if is_write):
        if _is_folded(written):
            raise Untraceable(
                f"writes in place to a view of which several elements are one ({func}), as "
                "expand() makes them",
                "write to what it is a view of, or to a copy of it (x = x.clone())",
            )
        for is_write, read in dense:
            if not is_write and _overlap(written, read):
                raise Untraceable(
                    f"writes in place to a part of what it reads ({func})",
                    "some elements would be written before they are read; read a copy, x.clone()",
                )


def _is_folded(value: Tensor) -> bool:
    """Whether elements of a tensor may lie in the same place."""
    if 0 in value.shape:
        return False
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors lie in a part of the same memory, as far as torch looks."""
    if one is other or memory_of(one) != memory_of(other) or 0 in (one.numel(), other.numel()):
        return False
    if not (_is_dense(one) and _is_dense(other)):
        return False  # too hard for torch, too
    first, second = one.storage_offset(), other.storage_offset()
    if first == second and one.numel() == other.numel():
        return one.stride() != other.stride()
    return first < second + other.numel() and second < first + one.numel()


def _is_dense(value: Tensor) -> bool:
    reach = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if stride != reach:
                return False
            reach *= size
    return True
