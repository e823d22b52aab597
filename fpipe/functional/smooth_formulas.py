"""Normalisations in their plain mathematics.

They have forward-mode rules, but the derivative of those by the input is silently wrong (pytorch
#196699 and #196700: the saved mean and deviation are taken for constants), and that of group
normalisation takes no fake input that has no tangent, such as a batch. Weight normalisation has no
such rule, and the derivative of its backward is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor


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
    shape = (1, -1, *(1 for _ in input.shape[2:]))
    if training or running_mean is None or running_var is None:
        _refuse_running(running_mean)
        found = _normalized(input, [0, *range(2, input.dim())], eps)
    else:
        mean, variance = running_mean.view(shape), running_var.view(shape)
        found = (input - mean) * (variance + eps).rsqrt()
    return _scaled(found, input, _viewed(weight, shape), _viewed(bias, shape))


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
    shape = (1, -1, *(1 for _ in input.shape[2:]))
    found = _normalized(input, list(range(2, input.dim())), eps)
    return _scaled(found, input, _viewed(weight, shape), _viewed(bias, shape))


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    groups = input.unflatten(1, (num_groups, -1))
    found = _normalized(groups, list(range(2, groups.dim())), eps).flatten(1, 2)
    shape = (1, -1, *(1 for _ in input.shape[2:]))
    return _scaled(found, input, _viewed(weight, shape), _viewed(bias, shape))


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


def _scaled(found: Tensor, like: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    found = found if weight is None else found * weight
    found = found if bias is None else found + bias
    # Under autocast the kernels return single precision.
    return found if torch.is_autocast_enabled(like.device.type) else found.to(like.dtype)


def _viewed(value: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    return None if value is None else value.view(shape)


NORMALISATIONS: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = MappingProxyType(
    {
        F.layer_norm: _layer_norm,
        F.batch_norm: _batch_norm,
        F.instance_norm: _instance_norm,
        F.group_norm: _group_norm,
        torch._weight_norm: _weight_norm,
    }
)
"""What computes the same, by the functions of torch that it stands for."""
