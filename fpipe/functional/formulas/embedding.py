"""Embeddings with padding, from which no gradient comes.

In forward mode the padding of torch's moves, and of members with tables or indices of their own
`vmap` would leave out that of the first alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fpipe.checks.explain import SPARSE, Untraceable


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
    # Of members who have tables or indices of their own it would be the padding of the first alone.
    found = F.embedding(input, weight, None, max_norm, norm_type, scale_grad_by_freq)
    if padding_idx is None:
        return found
    return _without_padding(found, input, padding_idx % len(weight))


def _torch_embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if sparse:
        raise Untraceable(*SPARSE)
    found = torch.embedding(weight, indices, -1, scale_grad_by_freq)
    return found if padding_idx < 0 else _without_padding(found, indices, padding_idx)


def _without_padding(found: Tensor, input: Tensor, padding_idx: int) -> Tensor:
    """What was found, from whose padding no gradient comes."""
    return torch.where((input == padding_idx).unsqueeze(-1), found.detach(), found)


EMBEDDINGS: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = MappingProxyType(
    {F.embedding: _embedding, torch.embedding: _torch_embedding}
)
"""What computes the same, by the functions of torch that it stands for."""
