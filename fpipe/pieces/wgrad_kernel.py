"""A Triton kernel that adds a product of two matrices to a sum with more bits than they have.

    sum ──────────┐
    a, b ─► a @ b ┴─► sum + a @ b      the product never leaves the registers

A weight's gradient is such a product, of as many terms as a microbatch has rows. cuBLAS writes it
in the dtype of its factors, so that a pass of its own must read it, and the sum, and write the sum.
Each program of this kernel makes one tile of the result, and tiles that are near each other in time
share rows of one factor and columns of the other, which the cache holds.

This module imports Triton; with ``TRITON_INTERPRET=1`` in the environment it runs on the CPU.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Config(NamedTuple):
    """How the kernel divides a product.

    Attributes:
        rows, columns: of a tile of the result.
        depth: of what is multiplied at once.
        warps: that make one tile.
        stages: how many loads are under way.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


CONFIGS: Final = (
    Config(128, 256, 64, 8, 3),
    Config(128, 128, 64, 4, 4),
    Config(128, 128, 32, 4, 4),
    Config(64, 64, 64, 4, 4),
)
"""Products that are measured: great ones, for devices with less shared memory, small ones."""

GROUP: Final = 8
"""Rows of tiles that are made at about the same time."""


def add_product(so_far: Tensor, a: Tensor, b: Tensor, config: Config) -> Tensor:
    """``so_far + a @ b``, summed in float32 and rounded once, to the dtype of `so_far`.

    Args:
        so_far: a matrix, in any layout; the result lies as it does, if it has no gaps.
        a: as many rows, in any layout.
        b: as many columns, in any layout, of the dtype of `a`.
        config: how to divide the product.
    """
    total = torch.empty_like(so_far)
    (rows, depth), columns = a.shape, b.shape[1]
    tiles = triton.cdiv(rows, config.rows) * triton.cdiv(columns, config.columns)
    # Triton's interpreter, which is numpy, takes the bits of bfloat16 for integers.
    widen = bool(triton.knobs.runtime.interpret) and a.dtype is torch.bfloat16
    if tiles:
        # Triton launches on the current device, wherever the matrices lie.
        with torch.cuda.device(so_far.device) if so_far.is_cuda else nullcontext():
            _add_product[(tiles,)](
                *(so_far, a, b, total, rows, columns, depth),
                *(so_far.stride() + a.stride() + b.stride() + total.stride()),
                WIDEN=widen,
                ROWS=config.rows,
                COLUMNS=config.columns,
                DEPTH=config.depth,
                GROUP=GROUP,
                num_warps=config.warps,
                num_stages=config.stages,
            )
    return total


@triton.jit
def _add_product(  # type: ignore[no-untyped-def]
    so_far_pointer,
    a_pointer,
    b_pointer,
    total_pointer,
    rows,
    columns,
    depth,
    so_far_row,
    so_far_column,
    a_row,
    a_column,
    b_row,
    b_column,
    total_row,
    total_column,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Tiles in groups of rows, and within a group column by column.
    tile = tl.program_id(0)
    across = tl.cdiv(columns, COLUMNS)
    first = tile // (GROUP * across) * GROUP
    height = tl.minimum(tl.cdiv(rows, ROWS) - first, GROUP)
    tile_row = first + tile % (GROUP * across) % height
    tile_column = tile % (GROUP * across) // height
    # A matrix may have more than 2**31 elements.
    i = (tile_row * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    j = (tile_column * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        k = start + tl.arange(0, DEPTH).to(tl.int64)
        a_inside = (i < rows) & (k[None, :] < depth)
        b_inside = (k[:, None] < depth) & (j < columns)
        a = tl.load(a_pointer + i * a_row + k[None, :] * a_column, a_inside, 0.0)
        b = tl.load(b_pointer + k[:, None] * b_row + j * b_column, b_inside, 0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
    inside = (i < rows) & (j < columns)
    total += tl.load(so_far_pointer + i * so_far_row + j * so_far_column, inside, 0.0)
    tl.store(total_pointer + i * total_row + j * total_column, total, inside)
