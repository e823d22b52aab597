"""Floating-point operations of a training step, and of the processor that runs it.

    FLOPs a token = 6 N + 12 layers x width x length      (PaLM, https://arxiv.org/abs/2204.02311)
    MFU = tokens a second x FLOPs a token / peak FLOPs a second

N counts the parameters of matrix products: all but tables that are looked up, biases and norms. Two
of the 6 are the forward's, four the backward's. The second term is attention's, as if nothing were
masked. What is computed again for lack of memory counts once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from fpipe.pieces.onednn_products import blas_is_slow

PUBLISHED: Final = {
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
}
"""Products of 16 bits a second without sparsity, by the makers' data sheets."""

FORMULA: Final = "tokens/s x (6 N + 12 layers width length) / peak"


def flops_of_token(products: int, layers: int, width: int, length: int) -> float:
    """Of a forward and a backward; `products` are the parameters of matrix products.

    Example:
        >>> flops_of_token(products=100, layers=2, width=4, length=8)
        1368
    """
    return 6 * products + 12 * layers * width * length


def peak_of(device: torch.device, dtype: torch.dtype, side: int | None = None) -> tuple[float, str]:
    """FLOPs a second that count as all of it, and where that number is from.

    Args:
        device: a GPU of `PUBLISHED` has that number for 16 bits; of all others it is measured.
        dtype: of the products.
        side: of the square matrices that are multiplied to measure it.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if name in PUBLISHED and dtype in (torch.bfloat16, torch.float16):
            return PUBLISHED[name], "published"
    side = side or (8192 if device.type == "cuda" else 1024)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    ways: list[Callable[[Tensor, Tensor], Tensor]] = [torch.mm]
    if device.type == "cpu" and dtype is torch.float32 and blas_is_slow():
        ways.append(torch.ops.fpipe.product)  # as compiled stages multiply
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    best = float("inf")
    for way in ways:
        for _ in range(10):
            synchronize()
            start = time.perf_counter()
            way(a, b)
            synchronize()
            best = min(best, time.perf_counter() - start)
    return 2 * side**3 / best, f"measured, products of {side} x {side} matrices"
