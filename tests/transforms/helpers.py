"""Pipelines, stacked values and norms for the tests of transforms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fpipe import pytree


def stacked(value: Any, members: int = 2, dim: int = 0) -> Any:
    """Members that differ, stacked along a dimension of every leaf."""
    factors = [1 + 0.1 * number for number in range(members)]
    return pytree.tree_map(
        lambda leaf: torch.stack([leaf * factor for factor in factors], dim), value
    )


def member(value: Any, number: int, dim: int = 0) -> Any:
    """One member of stacked values."""
    return pytree.tree_map(lambda leaf: leaf.select(dim, number), value)


def tracked(value: Any) -> Any:
    """Copies of all leaves that require a gradient."""
    return pytree.tree_map(lambda leaf: leaf.clone().requires_grad_(), value)


def norms_of(step: tuple[Tensor, Any]) -> tuple[Tensor, Tensor]:
    """Losses and norms of their gradients, of losses and gradients."""
    losses, grads = step
    squares = [g.flatten(losses.dim()).square().sum(-1) for g in pytree.flatten(grads)[0]]
    return losses, torch.stack(squares).sum(0).sqrt()
