"""Linear algebra whose batching in torch is wrong.

Under `vmap` torch takes one matrix for several right-hand sides, or several matrices for one, for
something else, and reads other memory: here both are expanded first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

_SOLVE_EX: Any = torch.return_types.linalg_solve_ex  # type: ignore[attr-defined]


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


def _solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    matrix, right, is_vector = _aligned(A, B)
    solution = torch.linalg.solve(matrix, right, left=left)
    return solution.squeeze(-1) if is_vector else solution


def _solve_ex(A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    matrix, right, is_vector = _aligned(A, B)
    solution, info = torch.linalg.solve_ex(matrix, right, left=left, check_errors=check_errors)
    return _SOLVE_EX((solution.squeeze(-1) if is_vector else solution, info))


def _aligned(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Matrices and right-hand sides with the same outer dimensions; whether `B` has vectors."""
    is_vector = B.dim() == 1 or B.shape == A.shape[:-1]
    right = B.unsqueeze(-1) if is_vector else B
    outer = torch.broadcast_shapes(A.shape[:-2], right.shape[:-2])
    return _repeated(A, outer, 2), _repeated(right, outer, 2), is_vector


LINEAR: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = MappingProxyType(
    {
        torch.linalg.solve: _solve,
        torch.linalg.solve_ex: _solve_ex,
        torch.linalg.lu_solve: _lu_solve,
    }
)
"""Functions that compute the same, by the functions of torch that they replace."""
