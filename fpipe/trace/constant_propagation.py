"""Values that depend on no argument are known while a function is traced, and may be branched on.

Code that was written to be run asks such questions of masks and positions that it makes itself:
``if mask.all()``. On abstract tensors there is no answer, but ``torch.ones(3).all()`` is True
whatever the arguments are, so that the trace may take the branch. And where they select elements,
as masks do, the trace knows how many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils.weak import WeakTensorKeyDictionary

from fpipe import pytree
from fpipe.inputs.signature import memory_of
from fpipe.trace.interrupts import let_through
from fpipe.trace.overrides.standin import Seeing

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


class Known(Seeing):
    """Computes beside the abstract values those that no argument goes into, and reads them.

    Zeros that a forward mode within the function makes without memory get some, for nothing can be
    computed with them; and fake ones lose their device when `vmap` has to look into them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values = WeakTensorKeyDictionary()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`; what it says of known values in Python is read off them."""
        if func.namespace != "prim":  # C++ asks for a device where nothing may be raised
            let_through()
        options = dict(kwargs or {})
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
