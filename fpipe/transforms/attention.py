"""Attention in a form that a transform can go through.

The fused kernels of `scaled_dot_product_attention` have no forward-mode rule anywhere, and no
batching rule on the CPU, where `vmap` would run them member by member. Within these contexts the
function is traced as its plain mathematics, which has every rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel


def differentiable_twice() -> AbstractContextManager[Any]:
    """For forward-mode derivatives, on every device."""
    return sdpa_kernel(SDPBackend.MATH)


def batched(devices: Iterable[str]) -> AbstractContextManager[Any]:
    """For `vmap` over values on devices of these types."""
    return sdpa_kernel(SDPBackend.MATH) if "cpu" in devices else nullcontext()
