"""Trace one stage in the middle of a pipeline, and look at its pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fpipe.pieces.partition import Policy, save_all
from fpipe.pieces.piece import Piece
from tests.models import Model
from tests.program.lowering import codes_of


def pieces_of(
    stage: Callable[..., Any], params: Any, x: Tensor, policy: Policy = save_all
) -> dict[str, Piece]:
    """The pieces of a stage whose input and output both carry gradients."""

    def first(p: Tensor, batch: Tensor) -> Tensor:
        return batch * p

    model = Model(
        [first, stage, lambda p, y: y],
        lambda y, _: sum(leaf.square().sum() for leaf in torch.utils._pytree.tree_leaves(y)),
        [torch.ones((), dtype=x.dtype), params, None],
        x,
    )
    return dict(codes_of(model, 1, policy)[1].pieces)


def ops(piece: Piece) -> list[str]:
    """The names of the aten ops of a piece, in order, without overloads."""
    return [
        node.target.overloadpacket.__name__
        for node in piece.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    ]


def count(piece: Piece, names: Iterable[str]) -> int:
    return sum(ops(piece).count(name) for name in names)
