"""The inverse of the normal distribution function, to the same bits on every device.

Compilers and the libraries of devices differ in the last digits of `torch.erfinv`, and some lose
half of all digits in its tails. Sums and products of doubles differ nowhere, unless a compiler
makes a fused multiply-add of the two. So the inverse is made of these, and is one operation of
torch's, which no compiler looks into: a polynomial for each of sixteen parts of every octave of the
probability (Cheung, Lee, Luk and Villasenor, "Hardware generation of arbitrary random number
distributions from uniform distributions via the inversion method", IEEE Transactions on VLSI
Systems 15, 2007).
"""

from __future__ import annotations

from collections import deque
from decimal import Context, Decimal, localcontext
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

MOST: Final = 52
"""Digits of a number: with one more, the middle of its part would be no double."""

_PARTS: Final = 16  # of an octave, told by the first four of a double's 52 digits
_ROWS: Final = MOST * _PARTS
_TERMS: Final = 11  # the rest is less than a double's last digit
_FEW_TERMS: Final = 6  # the rest is less than 10⁻¹⁰: no digit of a float32

_ORDER: Final = 24  # of the series from row to row, which are a sixteenth of their radius apart

_PART: Final = 1 << 15
"""Elements that a thread of the CPU computes at once, in its cache."""


def normal_quantile(
    number: Tensor, digits: int, *, exact: bool, mean: float = 0.0, std: float = 1.0
) -> Tensor:
    """Where a normal distribution function reaches the middle of a part of (0, 1).

    Args:
        number: which of ``2 ** digits`` equal parts: int64, from 0.
        digits: from 1 to `MOST`; without `exact` at most 38, from where it would not be monotone.
        exact: as exact as a double is; otherwise to 10⁻¹⁰, in half the operations.
        mean: of the distribution.
        std: its standard deviation.

    Returns:
        float64 tensor of the same shape. Of the standard distribution its relative error is less
        than 3·10⁻¹⁶ if it is exact.

    Example:
        >>> import torch
        >>> normal_quantile(torch.tensor([0, 1, 2, 3]), 2, exact=True)
        tensor([-1.1503, -0.3186,  0.3186,  1.1503], dtype=torch.float64)
    """
    assert number.dtype == torch.int64 and 1 <= digits <= (MOST if exact else 38)
    found: Tensor = torch.ops.fpipe.normal_quantile(number, digits, exact, mean, std)
    return found


# ── the operation ───────────────────────────────────────────────────────────────────────────────

_LIBRARY = torch.library.Library("fpipe", "FRAGMENT")
_LIBRARY.define(
    "normal_quantile(Tensor number, int digits, bool exact, float mean, float std) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.pointwise),
)


@torch.library.impl(_LIBRARY, "normal_quantile", "CompositeExplicitAutograd")
def _quantile(number: Tensor, digits: int, exact: bool, mean: float, std: float) -> Tensor:
    twice = 2 * number + (1 - (1 << digits))  # of the distance from the median: odd, with its sign
    # The probability of the tail times 2 ** (digits + 1). Of that its exponent, which is kept 1023
    # too great, and its first four digits say which row: the first is of 2 ** -(MOST + 1).
    tail = ((1 << digits) - twice.abs()).double().view(torch.int64)
    row = (tail >> 48) - (1023 + digits + 1 - (MOST + 1)) * _PARTS
    x = ((tail & (1 << 48) - 1) - (1 << 47)).double().mul_(2.0**-47)
    table = _on(number.device)
    count = _TERMS if exact else _FEW_TERMS
    found = table[count - 1].take(row)
    for coefficients in reversed(table[: count - 1]):
        found.mul_(x).add_(coefficients.take(row))
    found.mul_(twice).mul_(2.0**-digits)
    if (mean, std) != (0.0, 1.0):
        found.mul_(std).add_(mean)
    return found


@torch.library.impl(_LIBRARY, "normal_quantile", "CPU")
def _on_cpu(number: Tensor, digits: int, exact: bool, mean: float, std: float) -> Tensor:
    """Part by part."""
    parts = number.flatten().split(_PART * torch.get_num_threads())
    made = [_quantile(part, digits, exact, mean, std) for part in parts]
    return torch.cat(made).view(number.shape)


@torch.library.register_fake("fpipe::normal_quantile", lib=_LIBRARY)
def _shape(number: Tensor, digits: int, exact: bool, mean: float, std: float) -> Tensor:
    return number.new_empty(number.shape, dtype=torch.float64)


@torch.library.register_vmap("fpipe::normal_quantile", lib=_LIBRARY)
def _mapped(
    info: object, dims: tuple[int | None, ...], number: Tensor, *others: Any
) -> tuple[Tensor, int | None]:
    found: Tensor = torch.ops.fpipe.normal_quantile(number, *others)
    return found, dims[0]


# ── the table ───────────────────────────────────────────────────────────────────────────────────


@cache
def _on(device: torch.device) -> tuple[Tensor, ...]:
    """For each term its coefficients in all rows."""
    with torch.inference_mode(False):  # it outlives the mode
        rows = torch.tensor(_coefficients(), dtype=torch.float64, device=device)
        return rows.t().contiguous().unbind()


@cache
def _coefficients() -> list[list[float]]:
    """The polynomials of all rows, from the smallest probabilities on, in -1 ≤ x < 1.

    They are of the quantile over its distance from the median in probability, which is nowhere 0.
    The quantile z of a probability p of the tail solves z″ = z z′² (Steinbrecher and Shaw,
    "Quantile mechanics", European Journal of Applied Mathematics 19, 2008), so that its Taylor
    series about the middle of each row follows from that about the middle of the row above.
    """
    rows: deque[list[float]] = deque()
    with localcontext(Context(prec=40)):
        at, z, slopes = Decimal("0.5"), *_series(Decimal(0), -(2 * _pi()).sqrt())
        for number in reversed(range(_ROWS)):
            octave, part = divmod(number, _PARTS)
            half = Decimal(2) ** (octave - MOST - 1) / (2 * _PARTS)
            middle = half * (2 * (_PARTS + part) + 1)
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
    """The Taylor series of z and of z′."""
    z, slopes, products = [value], [slope], []
    for k in range(_ORDER):
        z.append(slopes[k] / (k + 1))
        products.append(_convolved(z, slopes, k))
        slopes.append(_convolved(products, slopes, k) / (k + 1))
    return z, slopes


def _convolved(a: list[Decimal], b: list[Decimal], k: int) -> Decimal:
    return sum((a[i] * b[k - i] for i in range(k + 1)), Decimal(0))


def _at(series: list[Decimal], step: Decimal) -> Decimal:
    found = Decimal(0)
    for coefficient in reversed(series):
        found = found * step + coefficient
    return found


def _pi() -> Decimal:
    """Machin's formula."""
    return 4 * (4 * _arctan_of_inverse(5) - _arctan_of_inverse(239))


def _arctan_of_inverse(number: int) -> Decimal:
    terms = range(60)
    return sum(
        (Decimal((-1) ** k) / ((2 * k + 1) * Decimal(number) ** (2 * k + 1)) for k in terms),
        Decimal(0),
    )
