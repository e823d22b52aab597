"""Functions of torch that no direction may go through: their second derivatives would be wrong.

- Solutions and determinants: their forward-mode rules take the factors of the matrix for constants.
- ``cholesky_inverse``: its rule is wrong before it is differentiated.
- ``logcumsumexp``: its rule subtracts sums, and loses its digits.
- Eigenvectors, ``cumprod`` and ``vander``, its caller: their rules divide by infinity and by zeros.
- Quantiles: they interpolate by ``lerp_``, whose abstract kernel fails within a `jvp`.

A refused function still takes constants, but for a quantile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from fpipe import pytree
from fpipe.torch_internals import functorch, retrieve_current_functorch_interpreter

_LU: Final = (
    "would be wrong; call torch.linalg.lu_solve(*torch.linalg.lu_factor(A), B), with "
    "B.unsqueeze(-1) for a vector"
)
_DETERMINANT: Final = (
    "would be wrong; take it of d = torch.linalg.lu_factor(A)[0].diagonal(dim1=-2, dim2=-1): "
    "d.prod(-1) is the determinant up to its sign, d.abs().log().sum(-1) the logarithm"
)
# After the abstract kernel of lerp_ has failed within a jvp, every later jvp of the thread fails.
_QUANTILES: Final = (torch.quantile, Tensor.quantile, torch.nanquantile, Tensor.nanquantile)

_REASONS: Final[Mapping[tuple[Callable[..., Any], ...], str]] = MappingProxyType(
    {
        (torch.linalg.solve, torch.linalg.solve_ex, torch.linalg.tensorsolve): _LU,
        (torch.linalg.det, torch.det, Tensor.det): _DETERMINANT,
        (torch.linalg.slogdet, torch.slogdet, Tensor.slogdet): _DETERMINANT,
        (torch.logdet, Tensor.logdet): _DETERMINANT,
        (torch.cholesky_solve, Tensor.cholesky_solve): (
            "would be wrong; call torch.linalg.solve_triangular twice, with L and then with L.mH"
        ),
        (torch.cholesky_inverse, Tensor.cholesky_inverse): (
            "would be wrong; call torch.linalg.inv(L @ L.mH)"
        ),
        (torch.linalg.eigh,): (
            "would be no number; of eigenvalues alone call torch.linalg.eigvalsh, and compute "
            "eigenvectors outside of the pipeline or within torch.no_grad()"
        ),
        (torch.linalg.eig,): (
            "would be no number; of eigenvalues alone call torch.linalg.eigvals, and compute "
            "eigenvectors outside of the pipeline or within torch.no_grad()"
        ),
        (torch.linalg.householder_product, torch.orgqr, Tensor.orgqr): (
            "would be wrong; call torch.linalg.qr, or multiply the reflections"
        ),
        (torch.triangular_solve, Tensor.triangular_solve): (
            "would be wrong; call torch.linalg.solve_triangular"
        ),
        (torch.cumprod, Tensor.cumprod, Tensor.cumprod_): (
            "would be no number at zeros; call torch.stack(list(itertools.accumulate("
            "x.unbind(dim), torch.mul)), dim), or x.log().cumsum(dim).exp() of positive numbers"
        ),
        (torch.linalg.vander,): (
            "would be no number at zeros; take torch.stack([x**k for k in range(n)], -1)"
        ),
        (torch.logcumsumexp, Tensor.logcumsumexp): (
            "would lose its digits; call torch.logsumexp of each part, as of "
            "x.unsqueeze(-2).masked_fill(later, -torch.inf)"
        ),
        _QUANTILES: (
            "fails in torch; sort the values with torch.sort, and interpolate between two of them"
        ),
    }
)
"""By functions of torch: the end of a sentence about the second derivative, and a way round."""


def _refusing(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """The function, which refuses arguments that have a direction."""

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = pytree.flatten((args, kwargs))[0]
        moves = any(isinstance(leaf, Tensor) and _has_tangent(leaf) for leaf in leaves)
        if moves or function in _QUANTILES:
            raise NotImplementedError(f"the second derivative of {function.__name__} {reason}")
        return function(*args, **kwargs)

    return call


def _has_tangent(value: Tensor) -> bool:
    """Whether a tensor has a tangent at any level of `torch.func`."""
    if functorch.peek_interpreter_stack() is None:
        return False
    interpreter = retrieve_current_functorch_interpreter()
    is_jvp = interpreter.key() == functorch.TransformType.Jvp
    if is_jvp and forward_ad.unpack_dual(value, level=0).tangent is not None:
        return True
    # Other transforms hide the tangents of the levels beneath them.
    if functorch.maybe_get_level(value) == interpreter.level():
        value = functorch.get_unwrapped(value)
    with interpreter.lower():
        return _has_tangent(value)


REFUSED: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = MappingProxyType(
    {
        function: _refusing(function, reason)
        for functions, reason in _REASONS.items()
        for function in functions
    }
)
"""By function of torch: the same, which refuses arguments that have a direction."""
