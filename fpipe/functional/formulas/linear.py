"""Linear algebra whose forward-mode rules torch differentiates wrongly, or whose batching is wrong.

The solution of a system and the determinant keep the factors of the matrix for their forward-mode
rules, which take them for constants: differentiated again, they are silently wrong. The rules of
``lu_factor`` and ``lu_solve``, which compute the same numbers, are right. That of
``cholesky_inverse`` is wrong before it is differentiated, and under `vmap` that of
``cholesky_solve``, where right-hand sides look like vectors for as many matrices; those of
``solve_triangular`` are right. Those of eigenvectors divide by infinity, whose derivative is no
number.

Under `vmap` torch takes one matrix for several right-hand sides, or several matrices for one, for
what they are not, and reads other memory: here both are expanded first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

_EIG: Any = torch.return_types.linalg_eig  # type: ignore[attr-defined]
_EIGH: Any = torch.return_types.linalg_eigh  # type: ignore[attr-defined]
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
    if not _is_vector(lu, right):
        return _lu_solve(lu, pivots, right, left=left)
    return _lu_solve(lu, pivots, right.unsqueeze(-1), left=left).squeeze(-1)


def _is_vector(matrix: Tensor, right: Tensor) -> bool:
    return right.dim() == 1 or right.shape == matrix.shape[:-1]


def _lu_solve(
    LU: Tensor, pivots: Tensor, B: Tensor, *, left: bool = True, adjoint: bool = False
) -> Tensor:
    outer = torch.broadcast_shapes(LU.shape[:-2], B.shape[:-2])
    return torch.linalg.lu_solve(
        _repeated(LU, outer, 2),
        _repeated(pivots, outer, 1),
        _repeated(B, outer, 2),
        left=left,
        adjoint=adjoint,
    )


def _repeated(value: Tensor, outer: Sequence[int], inner: int) -> Tensor:
    """The value for all of the `outer` dimensions, with the last `inner` of its own.

    In memory of its own: torch steps from matrix to matrix by a stride that an expanded value has
    otherwise, even where it is of one matrix alone.
    """
    shape = (*outer, *value.shape[value.dim() - inner :])
    if value.shape == shape:
        return value
    return value.expand(shape).clone(memory_format=torch.contiguous_format)


def _solve_several(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    return _solve_ex_several(A, B, left=left, check_errors=True)[0]


def _solve_ex_several(
    A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False
) -> Any:
    is_vector = _is_vector(A, B)
    right = B.unsqueeze(-1) if is_vector else B
    outer = torch.broadcast_shapes(A.shape[:-2], right.shape[:-2])
    found, info = torch.linalg.solve_ex(
        _repeated(A, outer, 2),
        _repeated(right, outer, 2),
        left=left,
        check_errors=check_errors,
    )
    return _SOLVE_EX((found.squeeze(-1) if is_vector else found, info))


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


def _cholesky_solve(input: Tensor, L: Tensor, upper: bool = False) -> Tensor:
    lower = L.mH if upper else L
    first = torch.linalg.solve_triangular(lower, input, upper=False)
    return torch.linalg.solve_triangular(lower.mH, first, upper=True)


def _cholesky_inverse(input: Tensor, upper: bool = False) -> Tensor:
    one = torch.eye(input.shape[-1], dtype=input.dtype, device=input.device)
    return _cholesky_solve(one.expand(input.shape), input, upper)


def _eigh(A: Tensor, UPLO: str = "L") -> Any:
    values, vectors = torch.linalg.eigh(A.detach(), UPLO)
    change = vectors.mH @ (A - A.detach()) @ vectors
    # torch's gradient takes one half of the matrix for both.
    own, moved = _perturbed(values, (change + change.mH) / 2)
    return _EIGH((own.real, _of_norm_one(vectors, vectors @ moved)))


def _eig(input: Tensor) -> Any:
    values, vectors = torch.linalg.eig(input.detach())
    change = (input - input.detach()).to(vectors.dtype)
    own, moved = _perturbed(values, torch.linalg.inv(vectors) @ change @ vectors)
    return _EIG((own, _of_norm_one(vectors, vectors @ moved)))


def _perturbed(values: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, and how much of the other vectors each eigenvector takes on.

    By perturbation theory to the second order, about the matrix as it is, so that values, first and
    second derivatives are exact. Where eigenvalues coincide, their vectors take on nothing.

    Args:
        values: of the matrix, constants.
        change: of the matrix, on the basis of its eigenvectors: 0, with derivatives.
    """
    diagonal = change.diagonal(dim1=-2, dim2=-1)
    own = values + (diagonal if values.is_complex() else diagonal.real)
    same = torch.eye(values.shape[-1], dtype=torch.bool, device=values.device)
    apart = values.unsqueeze(-2) != values.unsqueeze(-1)
    distance = torch.where(apart, own.unsqueeze(-2) - own.unsqueeze(-1), 1)
    inverse = torch.where(apart, 1 / distance, 0)
    mixing = change.masked_fill(same, 0)
    first = mixing * inverse
    return own + (mixing.mT * first).sum(-2), first + (mixing @ first) * inverse


def _of_norm_one(vectors: Tensor, moved: Tensor) -> Tensor:
    found = vectors + moved
    squares = (found * found.conj()).real.sum(-2, keepdim=True)
    return found / (squares / squares.detach()).sqrt()


LINEAR: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = MappingProxyType(
    {
        torch.linalg.solve: _solve,
        torch.linalg.solve_ex: _solve_ex,
        torch.linalg.lu_solve: _lu_solve,
        torch.linalg.eigh: _eigh,
        torch.linalg.eig: _eig,
        torch.linalg.det: _det,
        torch.det: _det,
        Tensor.det: _det,
        torch.linalg.slogdet: _slogdet,
        torch.slogdet: _slogdet,
        Tensor.slogdet: _slogdet,
        torch.logdet: _logdet,
        Tensor.logdet: _logdet,
        torch.cholesky_solve: _cholesky_solve,
        Tensor.cholesky_solve: _cholesky_solve,
        torch.cholesky_inverse: _cholesky_inverse,
        Tensor.cholesky_inverse: _cholesky_inverse,
    }
)
"""By function of torch: what gives the same, with derivatives that are right."""

BATCHED_LINEAR: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = MappingProxyType(
    {
        torch.linalg.solve: _solve_several,
        torch.linalg.solve_ex: _solve_ex_several,
        torch.linalg.lu_solve: _lu_solve,
    }
)
"""By function of torch: what gives the same under `vmap`."""

UNKNOWN: Final[Mapping[Callable[..., Any], str]] = MappingProxyType(
    {
        torch.linalg.tensorsolve: "call torch.linalg.solve with a matrix and a vector",
        torch.linalg.householder_product: "call torch.linalg.qr, or multiply the reflections",
        Tensor.triangular_solve: "call torch.linalg.solve_triangular",
        torch.triangular_solve: "call torch.linalg.solve_triangular",
    }
)
"""By function of torch that is as wrong, and of which there is no other: what to call instead."""
