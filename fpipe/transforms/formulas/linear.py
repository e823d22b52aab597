"""Linear algebra whose forward-mode rules torch differentiates wrongly, by other rules.

The solution of a system and the determinant keep the factors of the matrix for their forward-mode
rules, which take them for constants: differentiated again, they are silently wrong. The rules of
``lu_factor`` and ``lu_solve``, which compute the same numbers, are right. That of
``cholesky_inverse`` is wrong before it is differentiated; ``cholesky_solve`` has the right one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

_SLOGDET: Any = torch.return_types.linalg_slogdet  # type: ignore[attr-defined]
_SOLVE_EX: Any = torch.return_types.linalg_solve_ex  # type: ignore[attr-defined]


def _solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    lu, pivots = torch.linalg.lu_factor(A)
    return _solution(lu, pivots, B, left)


def _solve_ex(
    A: Tensor,
    B: Tensor,
    *,
    left: bool = True,
    check_errors: bool = False,
) -> Any:
    lu, pivots, info = torch.linalg.lu_factor_ex(A, check_errors=check_errors)
    return _SOLVE_EX((_solution(lu, pivots, B, left), info))


def _solution(lu: Tensor, pivots: Tensor, right: Tensor, left: bool) -> Tensor:
    is_vector = right.dim() == 1 or right.shape == lu.shape[:-1]
    if not is_vector:
        return torch.linalg.lu_solve(lu, pivots, right, left=left)
    return torch.linalg.lu_solve(lu, pivots, right.unsqueeze(-1), left=left).squeeze(-1)


def _det(A: Tensor) -> Tensor:
    diagonal, sign = _factored(A)
    return sign * diagonal.prod(-1)


def _slogdet(A: Tensor) -> Any:
    diagonal, sign = _factored(A)
    return _SLOGDET((sign * diagonal.sgn().prod(-1), diagonal.abs().log().sum(-1)))


def _logdet(input: Tensor) -> Tensor:
    sign, log = _slogdet(input)
    if input.is_complex():
        found: Tensor = sign.log() + log
        return found
    return torch.where(sign == -1, torch.nan, log)


def _factored(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The diagonal of the upper factor, and the sign of the permutation."""
    lu, pivots, _ = torch.linalg.lu_factor_ex(matrix)
    own = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    swaps = (pivots != own).sum(-1)
    return lu.diagonal(dim1=-2, dim2=-1), 1 - 2 * (swaps % 2)


def _cholesky_inverse(input: Tensor, upper: bool = False) -> Tensor:
    one = torch.eye(input.shape[-1], dtype=input.dtype, device=input.device)
    return torch.cholesky_solve(one.expand(input.shape), input, upper=upper)


LINEAR: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = MappingProxyType(
    {
        torch.linalg.solve: _solve,
        torch.linalg.solve_ex: _solve_ex,
        torch.linalg.det: _det,
        torch.det: _det,
        Tensor.det: _det,
        torch.linalg.slogdet: _slogdet,
        torch.slogdet: _slogdet,
        Tensor.slogdet: _slogdet,
        torch.logdet: _logdet,
        Tensor.logdet: _logdet,
        torch.cholesky_inverse: _cholesky_inverse,
        Tensor.cholesky_inverse: _cholesky_inverse,
    }
)
"""By function of torch: what gives the same, with derivatives that are right."""

UNKNOWN: Final[Mapping[Callable[..., Any], str]] = MappingProxyType(
    {
        torch.linalg.tensorsolve: "call torch.linalg.solve with a matrix and a vector",
        torch.linalg.householder_product: "call torch.linalg.qr, or multiply the reflections",
        Tensor.triangular_solve: "call torch.linalg.solve_triangular",
        torch.triangular_solve: "call torch.linalg.solve_triangular",
    }
)
"""By function of torch that is as wrong, and of which there is no other: what to call instead."""
