"""When each action can start at the earliest, whatever the exact costs are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fpipe.schedule.action import Action
from fpipe.schedule.dependencies import chain, dependencies


def earliest_starts(
    rows: Sequence[Sequence[Action]], num_stages: int, lengths: Mapping[str, float]
) -> list[list[float]] | None:
    """Per rank, the start of each action, once its rank is free and its inputs are there.

    Args:
        rows: the actions of each rank.
        num_stages: number of stages.
        lengths: the time that an op takes, in a unit of one's own; 0 for those that are not named.
            Sending takes none.

    Returns:
        The starts in the order of the rows; None where some of them can never be.

    Example:
        >>> rows = [[Action.parse("0F0"), Action.parse("0B0")], [Action.parse("1F0")]]
        >>> earliest_starts(rows, 2, {"F": 1, "B": 2})
        [[0.0, 1.0], [1.0]]
    """
    if any(not 0 <= action.stage < num_stages for row in rows for action in row):
        return None
    graph = dependencies(rows, chain(num_stages))
    ends = [0.0] * len(graph.actions)
    starts: list[list[float]] = [[] for _ in rows]
    for number in graph.run_order():
        rank, position = graph.place(number)
        free = ends[number - 1] if position else 0.0
        start = max([free, *(ends[need] for need in graph.needs[number])])
        ends[number] = start + lengths.get(graph.actions[number].op, 0)
        starts[rank].append(start)
    return starts if sum(map(len, starts)) == len(ends) else None
