"""The values of a cost for each stage of a placement: a share of numbers, by the speed of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from fpipe.errors import ScheduleError
from fpipe.schedule.cost_arguments import PerStage, values_of_stages

_TIMES: Final = ("f", "i", "w", "b", "update", "recompute")  # which ranks divide by their speed


def placed_values(
    values: Mapping[str, PerStage],
    placement: Sequence[int],
    ranks: int,
    speed: Sequence[float] | None,
) -> dict[str, tuple[float, ...]]:
    """A value for each stage of each of these arguments of a cost.

    Args:
        values: of the arguments, by name.
        placement: the rank of each stage.
        ranks: number of ranks.
        speed: of each rank; None where all are alike.

    Raises:
        ScheduleError: a sequence has not one value per stage, or there are too few speeds.

    Example:
        >>> placed_values({"f": 6, "activation": 2}, [0, 1, 1, 0], 2, speed=[1, 3])
        {'f': (3.0, 1.0, 1.0, 3.0), 'activation': (1.0, 1.0, 1.0, 1.0)}
    """
    if speed is not None and len(speed) < ranks:
        raise ScheduleError(
            f"cost.speed has {len(speed)} values for {ranks} ranks: give one per rank"
        )
    placed = {}
    for name, value in values.items():
        each = values_of_stages(name, value, len(placement), ranks)
        if speed is not None and name in _TIMES:
            each = tuple(time / speed[rank] for time, rank in zip(each, placement, strict=True))
        placed[name] = each
    return placed


def check_freed(kept: Sequence[float], freed: Sequence[float]) -> None:
    """Raise a `ScheduleError` where I would free more than F keeps."""
    for stage, (has, frees) in enumerate(zip(kept, freed, strict=True)):
        if frees > has * (1 + 1e-9):  # which may have been scaled otherwise
            raise ScheduleError(
                f"cost.freed_by_i is {frees:g} for stage {stage} and cost.activation is "
                f"{has:g}: I cannot free more than F keeps"
            )
