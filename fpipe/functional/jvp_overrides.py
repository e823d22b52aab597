"""Operations for whose derivative in a direction torch has no right rule: in plain mathematics, or
refused.

In plain mathematics:

- Normalisations: torch takes the saved mean and deviation for constants, so the second derivative
  by the input is wrong (pytorch #196699 and #196700). The rule of group normalisation fails on a
  fake input without a tangent, such as a batch.
- Weight normalisation and fused attention have no forward-mode rule. The plain mathematics of
  attention have no finite derivative for a query that may look at no key.
- ``glu``: its forward-mode rule cannot be differentiated again.
- ``sinc``: its rule divides by 0 at 0.
- ``lerp_``: its abstract kernel fails within a `jvp`, and so does every later `jvp` of the thread.
- Embeddings: no gradient comes from the padding, but the rule of torch moves it in forward mode,
  and under `torch.func.vmap` it keeps that of all members but the first.

Refused, for a second derivative would be wrong; a refused function still takes constants, but for a
quantile:

- Solutions and determinants: their forward-mode rules take the factors of the matrix for constants.
- ``cholesky_inverse``: its rule is wrong before it is differentiated.
- ``logcumsumexp``: its rule subtracts sums, and loses its digits.
- Eigenvectors, ``cumprod`` and ``vander``, its caller: their rules divide by infinity and by zeros.
- Quantiles: they interpolate by ``lerp_``, whose abstract kernel fails within a `jvp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor

from fpipe import pytree
from fpipe.checks.explain import SPARSE, Untraceable
from fpipe.torch_internals import functorch, retrieve_current_functorch_interpreter

# ── normalisations ──────────────────────────────────────────────────────────────────────────────


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    dims = list(range(-len(normalized_shape), 0))
    return _scaled(_normalized(input, dims, eps), input, weight, bias)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training or running_mean is None or running_var is None:
        _refuse_running(running_mean)
        normalized = _normalized(input, [0, *range(2, input.dim())], eps)
    else:
        mean, variance = _by_channel(running_mean, input), _by_channel(running_var, input)
        normalized = (input - mean) * (variance + eps).rsqrt()
    return _scaled(normalized, input, _by_channel(weight, input), _by_channel(bias, input))


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats:
        return _batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    _refuse_running(running_mean)
    normalized = _normalized(input, list(range(2, input.dim())), eps)
    return _scaled(normalized, input, _by_channel(weight, input), _by_channel(bias, input))


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    groups = input.unflatten(1, (num_groups, -1))
    normalized = _normalized(groups, list(range(2, groups.dim())), eps).flatten(1, 2)
    return _scaled(normalized, input, _by_channel(weight, input), _by_channel(bias, input))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    over = None if dim == -1 else [other for other in range(v.dim()) if other != dim % v.dim()]
    return v * (g / torch.linalg.vector_norm(v, 2, over, keepdim=over is not None))


def _refuse_running(running_mean: Tensor | None) -> None:
    if running_mean is not None:
        raise NotImplementedError(
            "a normalisation in training updates its running statistics in place, but a stage is a "
            "pure function: leave them out (track_running_stats=False)"
        )


def _normalized(input: Tensor, dims: list[int], eps: float) -> Tensor:
    # As the kernels do, in single precision at least.
    x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    x = x - x.mean(dims, keepdim=True)
    return x * (x.square().mean(dims, keepdim=True) + eps).rsqrt()


def _scaled(
    normalized: Tensor, input: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    scaled = normalized if weight is None else normalized * weight
    shifted = scaled if bias is None else scaled + bias
    # Under autocast the kernels return single precision.
    return shifted if torch.is_autocast_enabled(input.device.type) else shifted.to(input.dtype)


def _by_channel(value: Tensor | None, input: Tensor) -> Any:
    return None if value is None else value.view(1, -1, *(1 for _ in input.shape[2:]))


# ── embeddings ──────────────────────────────────────────────────────────────────────────────────


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if sparse:
        raise Untraceable(*SPARSE)
    rows = F.embedding(input, weight, None, max_norm, norm_type, scale_grad_by_freq)
    if padding_idx is None:
        return rows
    return _without_padding(rows, input, padding_idx % len(weight))


def _torch_embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if sparse:
        raise Untraceable(*SPARSE)
    rows = torch.embedding(weight, indices, -1, scale_grad_by_freq)
    return rows if padding_idx < 0 else _without_padding(rows, indices, padding_idx)


def _without_padding(rows: Tensor, indices: Tensor, padding_idx: int) -> Tensor:
    """The rows, of which those of the padding are constants."""
    return torch.where((indices == padding_idx).unsqueeze(-1), rows.detach(), rows)


EMBEDDINGS: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = MappingProxyType(
    {F.embedding: _embedding, torch.embedding: _torch_embedding}
)
"""By function of torch: an equal one, right under `torch.func.vmap` and in forward mode."""


# ── attention, gates and others ─────────────────────────────────────────────────────────────────


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *rest: Any,
    **options: Any,
) -> Tensor:
    if attn_mask is None:
        return F.scaled_dot_product_attention(query, key, value, None, *rest, **options)
    # The output for a query that may look at no key is 0, and so is its derivative.
    if attn_mask.dtype == torch.bool:
        sees_nothing = (~attn_mask).all(-1, keepdim=True)
        mask = attn_mask | sees_nothing
    else:
        sees_nothing = (attn_mask == -torch.inf).all(-1, keepdim=True)
        mask = attn_mask.masked_fill(sees_nothing, 0.0)
    output = F.scaled_dot_product_attention(query, key, value, mask, *rest, **options)
    return output.masked_fill(sees_nothing, 0.0)


def _glu(input: Tensor, dim: int = -1) -> Tensor:
    left, gate = input.chunk(2, dim)
    return left * gate.sigmoid()


def _sinc(input: Tensor) -> Tensor:
    # Near 0 by its series.
    angle = torch.pi * (input if input.is_floating_point() or input.is_complex() else input.float())
    is_small = angle.abs() < 0.05
    large, small_square = torch.where(is_small, 1, angle), torch.where(is_small, angle, 0).square()
    series = 1 - small_square / 6 * (1 - small_square / 20 * (1 - small_square / 42))
    return torch.where(is_small, series, large.sin() / large)


def _lerp_(input: Tensor, end: Tensor, weight: Any) -> Tensor:
    # The abstract kernel of the update in place looks for an overload, and prints its arguments for
    # each that does not fit, which is what fails within a jvp.
    return input.copy_(torch.lerp(input.clone(), end, weight))


SMOOTH_FORMULAS: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = MappingProxyType(
    {
        F.layer_norm: _layer_norm,
        F.batch_norm: _batch_norm,
        F.instance_norm: _instance_norm,
        F.group_norm: _group_norm,
        torch._weight_norm: _weight_norm,
        **EMBEDDINGS,
        F.scaled_dot_product_attention: _attention,
        F.glu: _glu,
        torch.sinc: _sinc,
        Tensor.sinc: _sinc,
        torch.special.sinc: _sinc,
        Tensor.lerp_: _lerp_,
    }
)
"""By function of torch: an equal one, whose derivatives in a direction are right, twice."""


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
