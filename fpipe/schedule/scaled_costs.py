"""Costs multiplied: of microbatches of another size, or with shorter times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fpipe.schedule.cost import Cost


def alike(cost: Cost, size: float, memory_size: float | None = None) -> Cost:
    """The cost of microbatches that are all of one size, and of another as to memory."""
    times = _multiplied(cost, ("f", "i", "w", "b", "recompute"), size)
    names = ("activation", "freed_by_i", "kept", "transfer")
    amounts = _multiplied(cost, names, size if memory_size is None else memory_size)
    return replace(cost, sizes=None, memory_sizes=None, **times, **amounts)


def with_times(cost: Cost, share: float) -> Cost:
    """The cost with all times of actions on microbatches multiplied by a share."""
    return replace(cost, **_multiplied(cost, ("f", "i", "w", "b"), share))


def _multiplied(cost: Cost, names: Sequence[str], factor: float) -> dict[str, Any]:
    def multiplied(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(multiplied, value))
        return None if value is None else value * factor

    return {name: multiplied(getattr(cost, name)) for name in names}
