"""Sums and products up to each element, with derivatives that are right everywhere.

The forward-mode rule of ``logcumsumexp`` loses its digits, and the derivative of that of
``cumprod`` is NaN at zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor


def _logcumsumexp(input: Tensor, dim: int) -> Tensor:
    # Each sum by itself: the forward-mode rule has differences of sums, which cancel.
    values = input.movedim(dim, -1).unsqueeze(-2)
    size = values.shape[-1]
    earlier = torch.ones(size, size, dtype=torch.bool, device=input.device).tril()
    found = torch.where(earlier, values, -torch.inf).logsumexp(-1).movedim(-1, dim)
    if input.is_complex():
        # Whole turns are left out of a logarithm, and torch keeps some of them.
        turns = torch.logcumsumexp(input.detach(), dim).imag - found.detach().imag
        found = found + torch.complex(torch.zeros_like(turns), turns)
    return found


def _cumprod(
    input: Tensor, dim: int, *, dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    # By doubling, in products alone: the derivative of the forward-mode rule divides by zeros.
    if out is not None:
        return torch.cumprod(input, dim, dtype=dtype, out=out)  # which has no derivative
    input = input if dtype is None else input.to(dtype)
    if not (input.is_floating_point() or input.is_complex()):
        return torch.cumprod(input, dim)
    if not input.dim():
        return input.clone()
    half = input.dtype in (torch.float16, torch.bfloat16)
    found, reach = (input.float() if half else input).movedim(dim, -1), 1
    while reach < found.shape[-1]:
        later = found[..., reach:] * found[..., :-reach]
        found, reach = torch.cat([found[..., :reach], later], -1), 2 * reach
    return found.movedim(-1, dim).to(input.dtype)


def _cumprod_(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    return input.copy_(_cumprod(input.clone(), dim, dtype=dtype))


CUMULATIVE: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = MappingProxyType(
    {
        torch.logcumsumexp: _logcumsumexp,
        Tensor.logcumsumexp: _logcumsumexp,
        torch.cumprod: _cumprod,
        Tensor.cumprod: _cumprod,
        Tensor.cumprod_: _cumprod_,
    }
)
"""What computes the same, by the functions of torch that it stands for."""
