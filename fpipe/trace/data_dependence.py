"""Python code that looks at data, under a trace: constants are known, and checks are left out.

Values that depend on no argument may be branched on. Code that was written to be run asks such
questions of masks and positions that it makes itself: ``if mask.all()``. On abstract tensors there
is no answer, but ``torch.ones(3).all()`` is True whatever the arguments are, so that the trace may
take the branch. And where they select elements, as masks do, the trace knows how many.

Functions of torch that look at data without need, to check or to print it, are made to do without.
So are those that write by way of memory, which a view has no part of its own in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import optree
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributions import constraints
from torch.utils._mode_utils import no_dispatch
from torch.utils.hooks import BackwardHook
from torch.utils.weak import WeakTensorKeyDictionary

from fpipe import pytree
from fpipe.checks.explain import Untraceable
from fpipe.inputs.signature import memory_of
from fpipe.torch_internals import innermost_transform, transforms
from fpipe.trace.overrides.ctc import ctc_loss
from fpipe.trace.overrides.recurrent import RECURRENT_ON_CUDA
from fpipe.trace.overrides.standin import Instead, StandIn

_MOST = 2**20
"""Elements of a value that is kept: bigger ones are masks of long sequences, and cost time."""

_ANSWERS = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default})
_LITERAL = torch.ops.aten.lift_fresh.default  # of what torch.tensor has made

_SHAPED: Final = frozenset(
    {
        torch.ops.aten.nonzero.default,
        torch.ops.aten._unique2.default,
    }
)
"""Ops whose results have as many elements as a value says: constant if the value is."""

_SELECT: Final = torch.ops.aten.masked_select.default
_INDEX: Final = torch.ops.aten.index.Tensor
_INDEXING: Final = frozenset(
    {
        _INDEX,
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_put_.default,
    }
)
"""Ops that take masks, whose values decide how many elements are selected."""

_ZEROS = torch.ops.aten._efficientzerotensor.default
_SYMBOLIC: ContextVar[bool] = ContextVar("fpipe.symbolic_zeros", default=False)


@contextmanager
def symbolic_zeros() -> Iterator[None]:
    """Within it the zeros that stand for a missing direction stay what they are, without memory."""
    token = _SYMBOLIC.set(True)
    try:
        yield
    finally:
        _SYMBOLIC.reset(token)


@dataclass(eq=False)
class Known:
    """Computes beside the abstract values those that no argument goes into, and reads them.

    Zeros that a forward mode within the function makes without memory get some, for nothing can be
    computed with them; and fake ones lose their device when `vmap` has to look into them.
    """

    _values: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def __call__(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Any:
        """Call `func`; what it says of known values in Python is read off them."""
        nothing = not len(self._values) and func is not _LITERAL
        if nothing and any(isinstance(argument, Tensor) for argument in args):
            return func(*args, **options)
        if func is _ZEROS:
            if _SYMBOLIC.get():
                return func(*args, **options)
            func = torch.ops.aten.zeros.default
        if func is _SELECT and args[1] in self._values:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            with no_dispatch():
                mask = self._values[args[1]].expand(shape)
            func, args = _INDEX, (args[0].expand(shape), self._places(mask))
        elif func in _INDEXING:
            args = args[0], self._without_masks(args[1]), *args[2:]
        leaves, spec = pytree.flatten((args, options))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if func is _LITERAL and not isinstance(args[0], FakeTensor):
            with no_dispatch():  # a write to what is computed beside must not reach the literal
                self._values[args[0]] = args[0].clone()
        known = all(tensor in self._values for tensor in tensors)
        if func in _ANSWERS and known:
            with no_dispatch():
                return func(*(self._values[tensor] for tensor in tensors))
        if func in _SHAPED and known:
            real, keywords = self._real(leaves, spec)
            with no_dispatch():
                answer = func(*real, **keywords)
            return pytree.tree_map(self._literal, answer)
        result = func(*args, **options)
        if func._schema.is_mutable and not known:
            self._forget(func, args, options)
        elif known and torch.Tag.nondeterministic_seeded not in func.tags:
            self._keep(result, func, *self._real(leaves, spec))
        return result

    def _forget(
        self, func: torch._ops.OpOverload, args: Sequence[Any], options: Mapping[str, Any]
    ) -> None:
        """Whatever looks at the memory that an operation has written to is not known any more."""
        if not len(self._values):
            return
        pairs = [*zip(func._schema.arguments, args, strict=False)]
        pairs += [(a, options[a.name]) for a in func._schema.arguments if a.name in options]
        written = {
            memory_of(value)
            for argument, passed in pairs
            if argument.is_write
            for value in (passed if isinstance(passed, list | tuple) else (passed,))
            if isinstance(value, Tensor)
        }
        for tensor in list(self._values):
            if memory_of(tensor) in written:
                del self._values[tensor]

    def _real(self, leaves: Sequence[Any], spec: optree.PyTreeSpec) -> Any:
        """Known arguments, with their values in place of the abstract ones."""
        real = [self._values[v] if isinstance(v, Tensor) else v for v in leaves]
        return pytree.unflatten(spec, real)

    def _without_masks(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The same with the places that known masks select in place of these."""
        replaced: list[Tensor | None] = []
        for index in indices:
            mask = None if index is None else self._values.get(index)
            if mask is None or mask.dtype != torch.bool or not mask.dim():
                replaced.append(index)
            else:
                replaced += self._places(mask)
        return replaced

    def _places(self, mask: Tensor) -> list[Tensor]:
        """Where a mask is true, along each dimension."""
        with no_dispatch():
            places = mask.nonzero().unbind(1)
        return list(map(self._literal, places))

    def _literal(self, value: Tensor) -> Tensor:
        """A value as a tensor that the function makes of numbers."""
        with no_dispatch():
            numbers = value.tolist()
        literal = torch.tensor(numbers, dtype=value.dtype, device=value.device).view(value.shape)
        self._values[literal] = value
        return literal

    def _keep(
        self, result: Any, func: Any, args: Sequence[Any], options: Mapping[str, Any]
    ) -> None:
        abstract = pytree.flatten(result)[0]
        if any(not isinstance(v, Tensor) or v.is_meta or v.numel() > _MOST for v in abstract):
            return
        try:
            with no_dispatch(), torch.no_grad():
                values = pytree.flatten(func(*args, **options))[0]
        except Exception:
            # For one on a device that is not there; it is as if an argument went into it.
            return
        for place, value in zip(abstract, values, strict=True):
            self._values[place] = value


@contextmanager
def without_data_checks() -> Iterator[None]:
    """Within it torch does not check the values of arguments.

    Indices of `one_hot` that are no class give rows of zeros, as on CUDA under torch.compile; in
    `gaussian_nll_loss` a negative variance counts as `eps`; and `torch.distributions` take what
    they are given. A tensor that is formatted into a message, needed or not, appears as its shape.
    Nor does the derivative of ``x[mask] = value`` count what is masked, where all of that gets the
    same value, or `ctc_loss` the symbols of its longest target. `istft` does not see whether its
    windows leave a gap, where it divides by zero. Code that reads or fills ``.grad``, which a pure
    function has not, is refused. Recurrent layers do not lay their weights in one piece for cuDNN.
    """
    stand_ins = (_CHECKS, _WEIGHTS, _SAVING, _BACKWARDS, *_SET_UP)
    with ExitStack() as stack:
        for stand_in in stand_ins:
            stack.enter_context(stand_in.active())
        stack.enter_context(Instead(_WITHOUT))
        yield


def _set_item(x: Tensor, index: Any, value: Any) -> None:
    if isinstance(index, Tensor) and not index.dim() and isinstance(value, bool | int | float):
        value = torch.tensor(value, dtype=x.dtype, device=x.device)
    if _is_one_value(x, index, value):
        _set_where(x, index, value)
    else:
        x[index] = value


def _is_one_value(x: Tensor, index: Any, value: Any) -> bool:
    """Whether all that a mask selects is set to the same."""
    if not (isinstance(index, Tensor) and index.dtype == torch.bool and isinstance(value, Tensor)):
        return False
    fits = value.numel() == 1 and (x.is_complex() or not value.is_complex())
    if value.dtype != x.dtype and not fits:
        return False  # torch says what is wrong
    rest = x.dim() - index.dim()
    if rest < 0 or index.shape != x.shape[: index.dim()]:
        return False
    return all(size == 1 for size in value.shape[: max(value.dim() - rest, 0)])


def _set_where(x: Tensor, mask: Tensor, value: Tensor) -> None:
    rest = x.dim() - mask.dim()
    value = value.reshape(value.shape[max(value.dim() - rest, 0) :]).to(x.dtype)
    x.copy_(torch.where(mask.reshape([*mask.shape, *[1] * rest]), value, x))


def _fill_diagonal(x: Tensor, fill_value: Any, wrap: bool = False) -> Tensor:
    differ = x.dim() > 2 and len(set(x.shape)) > 1
    if wrap or x.dim() < 2 or differ or isinstance(fill_value, Tensor):
        return x.fill_diagonal_(fill_value, wrap)
    place = torch.arange(min(x.shape), device=x.device)
    return x.index_put_((place,) * x.dim(), x.new_full((), fill_value))


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:  # the greatest index says how many: that needs data, and is refused
        return torch.nn.functional.one_hot(tensor, num_classes)
    classes = torch.arange(num_classes, device=tensor.device)
    return (tensor.unsqueeze(-1) == classes).to(torch.int64)


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    if var.dim() != input.dim() or any(
        size not in (1, other) for size, other in zip(var.shape, input.shape, strict=True)
    ):
        raise ValueError(f"var has the shape {tuple(var.shape)}, the input {tuple(input.shape)}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is not mean, sum or none")
    # The bound has no gradient of its own: below it that of the variance stays what it is.
    var = torch.where(var < eps, eps + (var - var.detach()), var)
    loss = 0.5 * (var.log() + (input - target).square() / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else getattr(loss, reduction)()


def _format(x: Tensor, spec: str = "") -> str:
    return format(x, spec) if x.dim() else f"a tensor of shape {tuple(x.shape)}"


def _register_hook(x: Tensor, hook: Any) -> Any:
    if innermost_transform() is not None:
        raise _refuse_hooks("registers a hook on a tensor")
    return x.register_hook(hook)


def _refuse_hooks(kind: str) -> Untraceable:
    return Untraceable(
        f"{kind} within a transform of torch.func, its own or the pipeline's",
        "torch hears none there; take the pipeline without the transform, or without the hooks",
    )


def _set_up(name: str) -> StandIn:
    def set_up(hook: Any, values: Any) -> Any:
        if stand_in.is_active and innermost_transform() is not None:
            raise _refuse_hooks("calls a module that has backward hooks")
        return stand_in.original(BackwardHook)(hook, values)

    stand_in = StandIn(name, {BackwardHook: set_up})
    return stand_in


def _enter(hooks: Any) -> Any:
    kinds = transforms()
    moved = isinstance(hooks, save_on_cpu) and "Grad" not in kinds  # which changes no value
    if _SAVING.is_active and not moved and {"Jvp", "Grad"} & set(kinds):
        raise _refuse_hooks("uses saved-tensor hooks")
    return _SAVING.original(saved_tensors_hooks)(hooks)


def _backward(*args: Any, **options: Any) -> Any:
    if _BACKWARDS.is_active:
        _refuse_grad(*args, **options)
    return _BACKWARDS.original(torch.autograd)(*args, **options)


def _refuse_grad(x: Tensor, *_: Any, **__: Any) -> None:
    raise Untraceable(
        "calls backward() or retain_grad(), or registers a hook for what has been accumulated",
        "a stage is a pure function, whose gradients a step returns: there is no .grad; take "
        "derivatives with torch.autograd.grad or torch.func.grad, and hear a gradient with "
        "x.register_hook",
    )


_WITHOUT: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.nn.functional.one_hot: _one_hot,
    torch.nn.functional.gaussian_nll_loss: _gaussian_nll_loss,
    torch.nn.functional.ctc_loss: ctc_loss,
    torch.ctc_loss: ctc_loss,
    **RECURRENT_ON_CUDA,
    torch.istft: torch._refs.istft,
    Tensor.istft: torch._refs.istft,
    Tensor.__setitem__: _set_item,
    Tensor.fill_diagonal_: _fill_diagonal,
    Tensor.__format__: _format,
    Tensor.register_hook: _register_hook,
    Tensor.backward: _refuse_grad,
    Tensor.register_post_accumulate_grad_hook: _refuse_grad,
    Tensor.retain_grad: _refuse_grad,
    torch._is_all_true: lambda _: True,  # what distributions ask of a check
}
"""The replacement of each function."""


def _unlooked(kind: type) -> Callable[[Any, Tensor], Any]:
    def check(constraint: Any, value: Tensor) -> Any:
        # It looks whether all are symmetric before it looks at more.
        original = (
            type(constraints.symmetric).check if _CHECKS.is_active else _CHECKS.original(kind)
        )
        return original(constraint, value)

    return check


_DEFINITE = (type(constraints.positive_definite), type(constraints.positive_semidefinite))
_CHECKS = StandIn("check", {kind: _unlooked(kind) for kind in _DEFINITE})


def _left_apart(layer: nn.RNNBase) -> None:
    if not _WEIGHTS.is_active:
        _WEIGHTS.original(nn.RNNBase)(layer)


_WEIGHTS = StandIn("flatten_parameters", {nn.RNNBase: _left_apart})

_SET_UP = (_set_up("setup_input_hook"), _set_up("setup_output_hook"))
_SAVING = StandIn("__enter__", {saved_tensors_hooks: _enter})
_BACKWARDS = StandIn("backward", {torch.autograd: _backward})
