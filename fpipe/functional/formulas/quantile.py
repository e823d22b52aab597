"""Quantiles without updates in place.

torch interpolates between two ranks by ``lerp_``, whose abstract kernel fails within a `jvp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor


def _lerp_(input: Tensor, end: Tensor, weight: Any) -> Tensor:
    # The abstract kernel of the update in place looks for an overload, and prints its arguments for
    # each that does not fit. That fails within a jvp, and so does every jvp of the thread after it.
    return input.copy_(torch.lerp(input.clone(), end, weight))


def _quantile(
    input: Tensor,
    q: float | Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> Tensor:
    return _at_rank(input, q, dim, keepdim, interpolation, counts_nan=True)


def _nanquantile(
    input: Tensor,
    q: float | Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> Tensor:
    return _at_rank(input, q, dim, keepdim, interpolation, counts_nan=False)


def _at_rank(
    input: Tensor,
    q: float | Tensor,
    dim: int | None,
    keepdim: bool,
    interpolation: str,
    *,
    counts_nan: bool,
) -> Tensor:
    """A quantile; torch interpolates by an update in place, as in `_lerp_`, and may look at `q`."""
    line = input.flatten() if dim is None or not input.dim() else input.movedim(dim, -1)
    values = line.sort(-1).values  # NaN comes last
    missing = values.isnan()
    last = values.shape[-1] - 1
    at = q if isinstance(q, Tensor) else values.new_tensor(q)
    if counts_nan:
        ranks = torch.where(missing.any(-1, keepdim=True), last, at.reshape(-1) * last)
    else:
        ranks = at.reshape(-1) * (last - missing.sum(-1, keepdim=True)).clamp(min=0)
    if interpolation == "nearest":
        ranks = ranks.round()
    lower, upper = ranks.floor(), ranks.ceil()
    below, above = values.gather(-1, lower.long()), values.gather(-1, upper.long())
    match interpolation:
        case "linear":
            found = torch.lerp(below, above, ranks - lower)
        case "midpoint":
            found = torch.lerp(below, above, 0.5)
        case "higher":
            found = above
        case _:
            found = below
    found = found.movedim(-1, 0)
    if keepdim:
        dims = input.dim()
        if dim is None or not dims:
            found = found.reshape(-1, *[1] * dims)
        else:
            found = found.unsqueeze(dim % dims + 1)
    return found if at.dim() else found.squeeze(0)


QUANTILES: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = MappingProxyType(
    {
        Tensor.lerp_: _lerp_,
        torch.quantile: _quantile,
        Tensor.quantile: _quantile,
        torch.nanquantile: _nanquantile,
        Tensor.nanquantile: _nanquantile,
    }
)
"""What computes the same, by the functions of torch that it stands for."""
