"""Costs multiplied: of microbatches of another size, or with shorter times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fpipe.schedule.cost import PER_MICROBATCH, Cost


def alike(cost: Cost, size: float) -> Cost:
    """The cost of microbatches that are all of one size."""
    names = (*PER_MICROBATCH, "transfer", "recompute", "kept")
    return replace(cost, sizes=None, **_multiplied(cost, names, size))


def with_times(cost: Cost, share: float) -> Cost:
    """The cost with all times of actions on microbatches multiplied by a share."""
    return replace(cost, **_multiplied(cost, ("f", "i", "w", "b"), share))


def _multiplied(cost: Cost, names: Sequence[str], factor: float) -> dict[str, Any]:
    def multiplied(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(multiplied, value))
        return None if value is None else value * factor

    return {name: multiplied(getattr(cost, name)) for name in names}
