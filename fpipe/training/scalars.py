"""Numbers that a graph takes when it runs: recorded as symbols, with what was asked of them.

Code that reads a hyperparameter computes with it in Python (``-lr``, ``1 - beta ** step``) and may
branch on it (``if weight_decay != 0``). A symbol goes through the first, and notes the second as a
guard: a condition under which the recording is right.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx

from fpipe.torch_internals import make_shape_env, node_of, symbol_of, track_symbol

Guard = Callable[..., bool]
"""A function of the values of the symbols, by their names."""


class Symbols:
    """Makes symbols, and knows what a recording has taken for granted of them."""

    def __init__(self) -> None:
        self.env = make_shape_env()
        self._names: dict[sympy.Symbol, str] = {}
        self._read = 0

    def new(self, name: str, value: float) -> Any:
        """A symbolic float or integer, which stands for `value` where code branches on it."""
        number = symbol_of(self.env, name, value)
        self._names[number.node.expr] = name
        return number

    def item(self, value: Tensor) -> Any:
        """The number in a tensor of no dimensions, read when the graph runs."""
        self._read += 1
        number = symbol_of(self.env, f"read_{self._read}", 0.5)
        node = node_of(value)
        assert node is not None
        track_symbol(number, torch.ops.aten._local_scalar_dense.default, node)
        return number

    def guards(self) -> tuple[Guard, ...]:
        """Conditions on the symbols that `new` has made.

        Raises:
            ValueError: the code has branched on what only the graph knows.
        """
        return tuple(self._guard(guard.expr) for guard in self.env.guards)

    def _guard(self, condition: Any) -> Guard:
        unknown = [s for s in condition.free_symbols if s not in self._names]
        if unknown:
            raise ValueError("it branches on the value of a tensor")
        symbols = sorted(condition.free_symbols, key=str)
        names = [self._names[symbol] for symbol in symbols]
        holds = sympy.lambdify(symbols, condition, modules=[_FUNCTIONS, "math"])
        return lambda values: bool(holds(*(values[name] for name in names)))


_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "FloatPow": operator.pow,
    "FloatTrueDiv": operator.truediv,
    "PowByNatural": operator.pow,
    "ToFloat": float,
}
"""How the functions that torch writes into conditions are computed."""


class WithTensors(fx.Interpreter):
    """Runs a recording whose numbers are tensors without dimensions, in float64.

    Then a number may be mapped by `torch.func.vmap`, have a history of autograd, or be an input of
    compiled code. Like a number it does not widen what it is multiplied with.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """An operation that takes floats alone is written out by others."""
        call = _WRITTEN_OUT.get(target)
        return (
            super().call_function(target, args, kwargs) if call is None else call(*args, **kwargs)
        )


def _sum(a: Tensor, b: Any, *, alpha: Any = 1) -> Tensor:
    return a + (b if _is_one(alpha) else b * alpha)


def _difference(a: Tensor, b: Any, *, alpha: Any = 1) -> Tensor:
    return a - (b if _is_one(alpha) else b * alpha)


def _with_product(a: Tensor, b: Tensor, c: Tensor, *, value: Any = 1) -> Tensor:
    return a + b * c * value


def _with_quotient(a: Tensor, b: Tensor, c: Tensor, *, value: Any = 1) -> Tensor:
    return a + b / c * value


def _lerp(a: Tensor, b: Tensor, weight: Any) -> Tensor:
    return a + (b - a) * weight


def _clamp(a: Tensor, low: Any = None, high: Any = None) -> Tensor:
    if low is not None:
        a = torch.maximum(a, _like(a, low))
    return a if high is None else torch.minimum(a, _like(a, high))


def _full(size: Sequence[int], value: Any, **options: Any) -> Tensor:
    options.pop("pin_memory", None)
    dtype = options.pop("dtype", None) or torch.get_default_dtype()
    return torch.zeros(size, dtype=dtype, **options) + _like_dtype(value, dtype)


def _full_like(a: Tensor, value: Any, **options: Any) -> Tensor:
    options.pop("pin_memory", None)
    return _like(a, _like_dtype(value, options.get("dtype") or a.dtype))


def _scalar_tensor(value: Any, **options: Any) -> Tensor:
    return _full((), value, dtype=options["dtype"], device=options["device"])


def _addmm(a: Tensor, b: Tensor, c: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return a * beta + b @ c * alpha


def _like(a: Tensor, number: Any) -> Tensor:
    return torch.zeros_like(a) + number


def _like_dtype(number: Any, dtype: torch.dtype) -> Any:
    return number.to(dtype) if isinstance(number, Tensor) else number


def _is_one(number: Any) -> bool:
    return not isinstance(number, Tensor) and number == 1


_ATEN: Final = torch.ops.aten
_WRITTEN_OUT: Final[Mapping[Any, Callable[..., Any]]] = {
    _ATEN.add.Tensor: _sum,
    _ATEN.sub.Tensor: _difference,
    _ATEN.addcmul.default: _with_product,
    _ATEN.addcdiv.default: _with_quotient,
    _ATEN.lerp.Scalar: _lerp,
    _ATEN.clamp.default: _clamp,
    _ATEN.clamp_min.default: _clamp,
    _ATEN.full.default: _full,
    _ATEN.full_like.default: _full_like,
    _ATEN.scalar_tensor.default: _scalar_tensor,
    _ATEN.addmm.default: _addmm,
    _ATEN.eq.Scalar: torch.eq,
    _ATEN._local_scalar_dense.default: Tensor.double,
}
"""Operations that take a number as a float alone, or that differ from the tensor's."""
