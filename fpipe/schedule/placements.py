"""Placements: which rank holds which stage, as the tuple that `Schedule.placement` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias, get_args

from fpipe.errors import ScheduleError, a_type
from fpipe.schedule.arguments import plain_integer

PlacementName: TypeAlias = Literal["linear", "looped", "v", "wave"]
NAMES: Final[tuple[str, ...]] = get_args(PlacementName)
_PER_RANK: Final = {"linear": "one stage", "v": "two stages", "wave": "an even number of stages"}


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


def waves(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Down and up again, once for every two stages per rank.

    The waves of Liu et al., Hanayo (https://arxiv.org/abs/2308.15762); one wave is a V.

    Example:
        >>> waves(2, stages_per_rank=4)
        (0, 1, 1, 0, 0, 1, 1, 0)
    """
    return vee(ranks) * (stages_per_rank // 2)


def named_placement(name: str, ranks: int, stages_per_rank: int | None = None) -> tuple[int, ...]:
    """The placement called ``"linear"``, ``"looped"``, ``"v"`` or ``"wave"``.

    By default it has 1 (linear), 2 (looped and V) or 4 (wave) stages per rank.

    Raises:
        ScheduleError: the name is unknown, or it has another number of stages per rank.

    Example:
        >>> named_placement("v", 3)
        (0, 1, 2, 2, 1, 0)
    """
    if name not in NAMES:
        raise ScheduleError(
            f"placement={name!r:.60} must be one of {', '.join(NAMES)}, or the rank of each stage, "
            "such as [0, 1, 1, 0]"
        )
    per_rank = {"linear": 1, "wave": 4}.get(name, 2) if stages_per_rank is None else stages_per_rank
    fits = {"linear": per_rank == 1, "v": per_rank == 2, "wave": per_rank % 2 == 0}
    if not fits.get(name, True):
        raise ScheduleError(
            f"placement={name!r:.60} has {_PER_RANK[name]} per rank, and the cost has values for "
            f"{per_rank}: choose another placement, or give costs of as many stages"
        )
    return looped(ranks, per_rank) if name in ("linear", "looped") else waves(ranks, per_rank)


def stages_on(placement: Sequence[int], rank: int) -> tuple[int, ...]:
    """The stages of a rank, in order.

    Example:
        >>> stages_on(vee(2), 1)
        (1, 2)
    """
    return tuple(stage for stage, owner in enumerate(placement) if owner == rank)


def stages_by_rank(placement: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank up to the greatest that has one, in order.

    Example:
        >>> stages_by_rank([0, 1, 1, 0])
        ((0, 3), (1, 2))
    """
    stages: list[list[int]] = [[] for _ in range(max(placement) + 1)]
    for stage, rank in enumerate(placement):
        stages[rank].append(stage)
    return tuple(map(tuple, stages))


def plain_placement(placement: Sequence[int]) -> tuple[int, ...]:
    """The placement of a caller, with Python integers as ranks.

    Raises:
        ScheduleError: it does not name a rank for each of one stage or more.

    Example:
        >>> plain_placement([0, 1, 1, 0])
        (0, 1, 1, 0)
    """
    if not isinstance(placement, Sequence):
        raise ScheduleError(
            f"placement={placement!r:.60} is {a_type(placement)}: it must be a sequence "
            "with the rank of each stage, such as [0, 1, 1, 0]"
        )
    plain = map(plain_integer, placement)
    ranks = tuple(int(rank) for rank in plain if rank is not None and rank >= 0)
    if len(ranks) < len(placement) or not ranks:
        raise ScheduleError(
            f"placement={tuple(placement)!r:.60} must have the rank of each stage, an integer, 0 "
            "or more, and at least one stage"
        )
    return ranks
