"""The placement that rows of actions imply: a stage lives where its actions stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fpipe.errors import ScheduleError
from fpipe.schedule.exchange.plain import Cell


def implied_placement(
    rows: Sequence[Sequence[Cell]], where: Callable[[int, int], str]
) -> tuple[int, ...]:
    """The rank of each stage, read off the rows.

    Args:
        rows: the actions of each rank.
        where: says a place in the file, given a rank and a column; for the error text.

    Raises:
        ScheduleError: two ranks run the same stage, or no rank runs a stage below the greatest.

    Example:
        >>> from fpipe.schedule.action import Action
        >>> rows = [[Cell(Action.parse("0F0"), 1)], [Cell(Action.parse("1F0"), 1)]]
        >>> implied_placement(rows, lambda rank, column: f"row {rank + 1}, column {column}")
        (0, 1)
    """
    first: dict[int, tuple[int, int]] = {}
    for rank, row in enumerate(rows):
        for action, column in row:
            seen = first.setdefault(action.stage, (rank, column))
            if seen[0] != rank:
                raise ScheduleError(
                    f"{where(rank, column)}: {action} is on rank {rank}, and stage {action.stage} "
                    f"is on rank {seen[0]} already ({where(*seen)}): a stage lives on one rank"
                )
    greatest = max(first, default=-1)
    for stage in range(greatest + 1):
        if stage not in first:
            raise ScheduleError(
                f"{where(*first[greatest])}: stage {greatest} is named here, and stage {stage} "
                "nowhere: stages are numbered from 0 without a gap, and each has an action"
            )
    return tuple(first[stage][0] for stage in range(greatest + 1))
