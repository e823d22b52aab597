"""Placements: which rank holds which stage, as the tuple that `Schedule.placement` takes."""

from __future__ import annotations


def linear(ranks: int) -> tuple[int, ...]:
    """One stage per rank: stage s on rank s.

    Example:
        >>> linear(3)
        (0, 1, 2)
    """
    return tuple(range(ranks))


def looped(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The stages go round the ranks: stage s on rank s mod `ranks`.

    Example:
        >>> looped(3, stages_per_rank=2)
        (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(ranks)) * stages_per_rank


def vee(ranks: int) -> tuple[int, ...]:
    """Two stages per rank, down and up again: first and last stage share rank 0.

    Example:
        >>> vee(3)
        (0, 1, 2, 2, 1, 0)
    """
    return (*range(ranks), *reversed(range(ranks)))
