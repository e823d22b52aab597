"""The inverse of the normal distribution function, to the same bits on every device.

Compilers and device libraries differ in the last digits of `torch.erfinv`, and some lose half of
all digits in its tails. Sums and products of doubles are the same everywhere, unless a compiler
fuses the two into a multiply-add. So the inverse consists of these, in one custom operation that no
compiler looks into: a polynomial for each of sixteen intervals of every octave of the probability
(Cheung, Lee, Luk and Villasenor, "Hardware generation of arbitrary random number distributions from
uniform distributions via the inversion method", IEEE Transactions on VLSI Systems 15, 2007).
"""

from __future__ import annotations

from collections import deque
from decimal import Context, Decimal, localcontext
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

MOST: Final = 52
"""The most binary digits of a number: with one more, its middle would not be a double."""

_INTERVALS: Final = 16  # in an octave: the first four of a double's 52 digits say which
_ROWS: Final = MOST * _INTERVALS
_TERMS: Final = 11  # the remainder is less than a double's last digit
_FEW_TERMS: Final = 6  # the remainder is less than 10⁻¹⁰: no digit of a float32

_PI: Final = Decimal("3.14159265358979323846264338327950288419716939937511")
_ORDER: Final = 24  # of the series from row to row, which are 1/16 of its radius apart

_CHUNK: Final = 1 << 15
"""Elements that a CPU thread computes at once: they stay in its cache."""


def normal_quantile(
    number: Tensor, digits: int, *, exact: bool, mean: float = 0.0, std: float = 1.0
) -> Tensor:
    """Invert a normal distribution function at the middle of an interval of (0, 1).

    Args:
        number: int64: the index of one of ``2 ** digits`` equal intervals, from 0.
        digits: from 1 to `MOST`; at most 38 unless `exact`, because beyond that the result would
            not be monotone.
        exact: compute all digits of a double; otherwise compute to 10⁻¹⁰, in half the operations.
        mean: of the distribution.
        std: its standard deviation.

    Returns:
        float64 tensor of the same shape. For the standard distribution an exact result has a
        relative error below 3·10⁻¹⁶.

    Example:
        >>> import torch
        >>> normal_quantile(torch.tensor([0, 1, 2, 3]), 2, exact=True)
        tensor([-1.1503, -0.3186,  0.3186,  1.1503], dtype=torch.float64)
    """
    assert number.dtype == torch.int64 and 1 <= digits <= (MOST if exact else 38)
    quantile: Tensor = torch.ops.fpipe.normal_quantile(number, digits, exact, mean, std)
    return quantile


# ── the operation ───────────────────────────────────────────────────────────────────────────────

_LIBRARY = torch.library.Library("fpipe", "FRAGMENT")
_LIBRARY.define(
    "normal_quantile(Tensor number, int digits, bool exact, float mean, float std) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.pointwise),
)


@torch.library.impl(_LIBRARY, "normal_quantile", "CompositeExplicitAutograd")
def _quantile(number: Tensor, digits: int, exact: bool, mean: float, std: float) -> Tensor:
    twice = 2 * number + (1 - (1 << digits))  # twice the signed distance from the median: odd
    # The probability of the tail times 2 ** (digits + 1). Its exponent (stored with a bias of 1023)
    # and its first four digits give the row; the first row starts at 2 ** -(MOST + 1).
    tail = ((1 << digits) - twice.abs()).double().view(torch.int64)
    row = (tail >> 48) - (1023 + digits + 1 - (MOST + 1)) * _INTERVALS
    x = ((tail & (1 << 48) - 1) - (1 << 47)).double().mul_(2.0**-47)
    table = _table_on(number.device)
    count = _TERMS if exact else _FEW_TERMS
    quantile = table[count - 1].take(row)
    for coefficients in reversed(table[: count - 1]):
        quantile.mul_(x).add_(coefficients.take(row))
    quantile.mul_(twice).mul_(2.0**-digits)
    if (mean, std) != (0.0, 1.0):
        quantile.mul_(std).add_(mean)
    return quantile


@torch.library.impl(_LIBRARY, "normal_quantile", "CPU")
def _on_cpu(number: Tensor, digits: int, exact: bool, mean: float, std: float) -> Tensor:
    """Compute chunk by chunk."""
    chunks = number.flatten().split(_CHUNK * torch.get_num_threads())
    quantiles = [_quantile(chunk, digits, exact, mean, std) for chunk in chunks]
    return torch.cat(quantiles).view(number.shape)


@torch.library.register_fake("fpipe::normal_quantile", lib=_LIBRARY)
def _fake(number: Tensor, digits: int, exact: bool, mean: float, std: float) -> Tensor:
    return number.new_empty(number.shape, dtype=torch.float64)


@torch.library.register_vmap("fpipe::normal_quantile", lib=_LIBRARY)
def _vmap(
    info: object, dims: tuple[int | None, ...], number: Tensor, *others: Any
) -> tuple[Tensor, int | None]:
    quantile: Tensor = torch.ops.fpipe.normal_quantile(number, *others)
    return quantile, dims[0]


# ── the table ───────────────────────────────────────────────────────────────────────────────────


@cache
def _table_on(device: torch.device) -> tuple[Tensor, ...]:
    """For each term of the polynomials its coefficients in all rows."""
    with torch.inference_mode(False):  # the cached table outlives the mode
        rows = torch.tensor(_coefficients(), dtype=torch.float64, device=device)
        return rows.t().contiguous().unbind()


@cache
def _coefficients() -> list[list[float]]:
    """The polynomials of all rows in -1 ≤ x < 1, from the smallest probabilities on.

    They approximate the quantile divided by the distance of the probability from 1/2, a quotient
    that is never 0. The quantile z of a tail probability p solves z″ = z z′² (Steinbrecher and
    Shaw, "Quantile mechanics", European Journal of Applied Mathematics 19, 2008), so its Taylor
    series about the middle of each row follows from the series about the middle of the row above.
    """
    rows: deque[list[float]] = deque()
    with localcontext(Context(prec=40)):
        at, z, slopes = Decimal("0.5"), *_series(Decimal(0), -(2 * _PI).sqrt())
        for number in reversed(range(_ROWS)):
            octave, interval = divmod(number, _INTERVALS)
            half = Decimal(2) ** (octave - MOST - 1) / (2 * _INTERVALS)
            middle = half * (2 * (_INTERVALS + interval) + 1)
            z, slopes = _series(_at(z, middle - at), _at(slopes, middle - at))
            at = middle
            quotient = Decimal(0)
            row = []
            for k in range(_TERMS):
                quotient = (z[k] + 2 * quotient) / (1 - 2 * middle)
                row.append(float(quotient * half**k))
            rows.appendleft(row)
    return list(rows)


def _series(value: Decimal, slope: Decimal) -> tuple[list[Decimal], list[Decimal]]:
    """The Taylor series of z and of z′ from their values at one point."""
    z, slopes, products = [value], [slope], []
    for k in range(_ORDER):
        z.append(slopes[k] / (k + 1))
        products.append(_convolved(z, slopes, k))
        slopes.append(_convolved(products, slopes, k) / (k + 1))
    return z, slopes


def _convolved(a: list[Decimal], b: list[Decimal], k: int) -> Decimal:
    return sum((a[i] * b[k - i] for i in range(k + 1)), Decimal(0))


def _at(series: list[Decimal], step: Decimal) -> Decimal:
    value = Decimal(0)
    for coefficient in reversed(series):
        value = value * step + coefficient
    return value
