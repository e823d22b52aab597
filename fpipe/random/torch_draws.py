"""torch's own random operations as functions of a key: the table `KEYED`.

With it, code that was written for torch's generator, such as `torch.nn.Dropout`, gives the same
numbers for the same key. The n-th random operation, in program order, draws from
``fold_in(key, n)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload

from fpipe.errors import FpipeError
from fpipe.random import distributions

aten = torch.ops.aten


def generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """The generators from which code on these devices may draw, that of the CPU first."""
    indices = {
        torch.cuda.current_device() if device.index is None else device.index
        for device in devices
        if device.type == "cuda"
    }
    on_cuda = [torch.cuda.default_generators[index] for index in sorted(indices)]
    return [torch.default_generator, *on_cuda]


def _like(x: Tensor, value: Tensor, memory_format: Any = None) -> Tensor:
    """The drawn `value` in the memory layout that torch gives it, which is that of `x`."""
    if memory_format is None and x.is_contiguous():
        return value
    options = {} if memory_format is None else {"memory_format": memory_format}
    return torch.empty_like(x, dtype=value.dtype, device=value.device, **options).copy_(value)


def _check(fits: bool, rule: str) -> None:
    """Refuse arguments that torch refuses too."""
    if not fits:
        raise FpipeError(f"an operation of torch draws from a key, and {rule}")


# ── the operations; the recorder leaves out arguments that equal their defaults ─────────────────


def _bernoulli(key: Tensor, x: Tensor, p: Any = 0.5, *, generator: Any = None) -> Tensor:
    # Contiguous, as torch's result is.
    return distributions.bernoulli(key.to(x.device), p, x.shape).to(x.dtype)


def _each_bernoulli(key: Tensor, p: Tensor, *, generator: Any = None) -> Tensor:
    return _bernoulli(key, p, p)


def _native_dropout(key: Tensor, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False:
        return x, torch.ones_like(x, dtype=torch.bool)
    mask = distributions.bernoulli(key.to(x.device), 1 - p, x.shape)
    return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _middles(key: Tensor, x: Tensor) -> Tensor:
    """A number from (0, 1) for each element of `x`, in float64."""
    distributions.check_dtype(x.dtype)
    return distributions.middles(key.to(x.device), x.shape, x.dtype)


def _uniform(
    key: Tensor, x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None
) -> Tensor:
    _check(low <= high, f"low={low} must not be greater than high={high}")
    drawn = distributions.uniform(key.to(x.device), x.shape, x.dtype)
    if (low, high) != (0.0, 1.0):
        drawn = (drawn.double() * (high - low) + low).to(x.dtype)
        # The greatest number may round up to `high`, which is excluded.
        drawn = torch.where(drawn < high, drawn, low)
    return _like(x, drawn)


def _normal(
    key: Tensor, x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None
) -> Tensor:
    _check(std >= 0, f"std={std} must be 0 or more")
    drawn = distributions.normal_doubles(key.to(x.device), x.shape, x.dtype, mean, std)
    return _like(x, drawn.to(x.dtype))


def _normal_about(key: Tensor, mean: Any, std: Any = 1.0, *, generator: Any = None) -> Tensor:
    # torch passes no gradient through it.
    mean, std = (v.detach() if isinstance(v, Tensor) else v for v in (mean, std))
    like = mean if isinstance(mean, Tensor) else std
    shape = torch.broadcast_shapes(*(v.shape for v in (mean, std) if isinstance(v, Tensor)))
    drawn = distributions.normal_doubles(key.to(like.device), shape, like.dtype)
    return (drawn * std + mean).to(like.dtype)


def _normal_of(
    key: Tensor,
    mean: float,
    std: float,
    size: Sequence[int],
    *,
    dtype: Any = None,
    device: Any = None,
    **_: Any,
) -> Tensor:
    _check(std >= 0, f"std={std} must be 0 or more")
    kind = dtype or torch.get_default_dtype()
    return distributions.normal_doubles(key.to(device or "cpu"), size, kind, mean, std).to(kind)


def _exponential(key: Tensor, x: Tensor, rate: float = 1.0, *, generator: Any = None) -> Tensor:
    _check(rate > 0, f"the rate of exponential_, {rate}, must be more than 0")
    drawn = (-torch.log(_middles(key, x)) / rate).to(x.dtype)
    return _like(x, drawn.clamp_min(torch.finfo(x.dtype).tiny))  # torch never draws 0


def _log_normal(
    key: Tensor, x: Tensor, mean: float = 1.0, std: float = 2.0, *, generator: Any = None
) -> Tensor:
    _check(std > 0, f"std={std} must be more than 0")
    normal = distributions.normal_doubles(key.to(x.device), x.shape, x.dtype, mean, std)
    return _like(x, normal.exp().to(x.dtype))


def _cauchy(
    key: Tensor, x: Tensor, median: float = 0.0, sigma: float = 1.0, *, generator: Any = None
) -> Tensor:
    _check(sigma > 0, f"sigma={sigma} must be more than 0")
    angle = math.pi * (_middles(key, x) - 0.5)
    return _like(x, (torch.tan(angle) * sigma + median).to(x.dtype))


def _geometric(key: Tensor, x: Tensor, p: float, *, generator: Any = None) -> Tensor:
    _check(0 < p < 1, f"p={p} of geometric_ must lie between 0 and 1")
    middles = distributions.middles(key.to(x.device), x.shape, torch.float64)
    return _like(x, (torch.floor(torch.log(middles) / math.log1p(-p)) + 1).to(x.dtype))


def _multinomial(
    key: Tensor, x: Tensor, num: int, replacement: bool = False, *, generator: Any = None
) -> Tensor:
    _check(x.is_floating_point(), f"the probabilities of multinomial are {x.dtype}: no floats")
    _check(num > 0, f"num_samples={num} must be more than 0")
    key, wide = key.to(x.device), x.detach().double()
    if not replacement:
        fits = num <= x.shape[-1]
        _check(fits, f"num_samples={num} without replacement is more than {x.shape[-1]}")
        return distributions.perturbed(key, wide.log()).topk(num).indices
    sums = wide.cumsum(-1)
    drawn = distributions.randint(key, 0, 1 << 32, (*x.shape[:-1], num)).double() * 2.0**-32
    places = torch.searchsorted(sums, drawn * sums[..., -1:], right=True)
    return places.clamp_max(x.shape[-1] - 1)


def rrelu(
    key: Tensor,
    x: Tensor,
    noise: Tensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    generator: Any = None,
) -> tuple[Tensor, Tensor]:
    """A leaky ReLU with random slopes, and the slopes, which its backward reads."""
    if not training:
        return F.leaky_relu(x, (lower + upper) / 2), noise
    slopes = torch.where(x <= 0, _uniform(key, x.detach(), lower, upper), 1.0)
    return x * slopes, slopes


def _randperm(key: Tensor, num: int, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    kind = dtype or torch.int64
    if not kind.is_floating_point:
        _check(num - 1 <= torch.iinfo(kind).max, f"the last of randperm({num}) is no {kind}")
    return distributions.permutation(key.to(device or "cpu"), num).to(kind)


def _randint(
    key: Tensor, high: int, size: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any
) -> Tensor:
    return _randint_from(key, 0, high, size, dtype=dtype, device=device)


def _randint_from(
    key: Tensor,
    low: int,
    high: int,
    size: Sequence[int],
    *,
    dtype: Any = None,
    device: Any = None,
    **_: Any,
) -> Tensor:
    return distributions.randint(key.to(device or "cpu"), low, high, size, dtype or torch.int64)


def _sized(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An operation that takes a size, from a function of a key, a shape and a dtype."""

    def drawn(
        key: Tensor, size: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any
    ) -> Tensor:
        return draw(key.to(device or "cpu"), size, dtype or torch.get_default_dtype())

    return drawn


def _alike(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An operation that draws a number for each element of a tensor, from such a function too.

    The operation's arguments after the tensor become the function's arguments before the shape.
    """

    def drawn(
        key: Tensor,
        x: Tensor,
        *bounds: int,
        dtype: Any = None,
        device: Any = None,
        memory_format: Any = None,
        **_: Any,
    ) -> Tensor:
        numbers = draw(key.to(device or x.device), *bounds, x.shape, dtype or x.dtype)
        return _like(x, numbers, memory_format)

    return drawn


def _below(key: Tensor, high: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return distributions.randint(key, 0, high, shape, dtype)


KEYED: Final[Mapping[OpOverload, Callable[..., Any]]] = MappingProxyType(
    {
        aten.bernoulli.default: _each_bernoulli,
        aten.bernoulli.p: _bernoulli,
        aten.bernoulli.Tensor: _bernoulli,
        aten.native_dropout.default: _native_dropout,
        aten.uniform.default: _uniform,
        aten.normal_functional.default: _normal,
        aten.normal.Tensor_float: _normal_about,
        aten.normal.float_Tensor: _normal_about,
        aten.normal.Tensor_Tensor: _normal_about,
        aten.normal.float_float: _normal_of,
        aten.exponential.default: _exponential,
        aten.log_normal.default: _log_normal,
        aten.cauchy.default: _cauchy,
        aten.geometric.default: _geometric,
        aten.multinomial.default: _multinomial,
        aten.rrelu_with_noise_functional.default: rrelu,
        aten.randperm.default: _randperm,
        aten.randint.default: _randint,
        aten.randint.low: _randint_from,
        aten.randint_like.default: _alike(_below),
        aten.randint_like.low_dtype: _alike(distributions.randint),
        aten.rand.default: _sized(distributions.uniform),
        aten.randn.default: _sized(distributions.normal),
        aten.rand_like.default: _alike(distributions.uniform),
        aten.randn_like.default: _alike(distributions.normal),
    }
)
"""For each operation a function of a key and of the operation's own arguments."""

KEYED_IN_PLACE: Final[Mapping[OpOverload, Callable[..., Any]]] = {
    aten.bernoulli_.float: _bernoulli,
    aten.bernoulli_.Tensor: _bernoulli,
    aten.uniform_.default: _uniform,
    aten.normal_.default: _normal,
    aten.exponential_.default: _exponential,
    aten.log_normal_.default: _log_normal,
    aten.cauchy_.default: _cauchy,
    aten.geometric_.default: _geometric,
}
"""The same for operations that write the numbers to their first argument."""

RRELU: Final = aten.rrelu_with_noise.default
"""An operation that writes the slopes that it draws to its second argument: see `rrelu`."""


def draws(op: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether a call of an operation draws from torch's generator."""
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    # Attention has this tag, but draws only if dropout_p is not 0. A tracer leaves out arguments
    # that equal their defaults.
    declared = op._schema.arguments
    values = {each.name: each.default_value for each in declared if each.has_default_value()}
    values |= {each.name: value for each, value in zip(declared, arguments, strict=False)}
    return bool({**values, **options}.get("dropout_p", True))


def refusal(op: Any) -> str:
    """Why an operation that is not in the table is refused, to follow the name of its caller."""
    return (
        f"draws with {op}, for which there is no function of a key (there is one for dropout, "
        "bernoulli, multinomial, rand, randn, randint, randperm, uniform, normal, log_normal, "
        "exponential, cauchy and geometric): draw with one of these, or do without a key; the "
        "backward then keeps the numbers that torch's generator draws"
    )
