"""What an action waited for: transfers between ranks, and the critical path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from fpipe.schedule.action import Action, Op
from fpipe.schedule.cost import Cost
from fpipe.schedule.schedule import Schedule

# A timeline's `Event`; spelt out because the timeline imports this module.
Timed: TypeAlias = tuple[int, Action, float, float]
Position: TypeAlias = tuple[int, int]  # rank, index in the rank's row


class Transfer(NamedTuple):
    """A value that crosses from one rank to another.

    Attributes:
        source: the action that made it.
        target: the action that reads it.
        source_rank: where it was made.
        target_rank: where it is read.
        sent: when its source ended.
        arrives: when its reader may start; without a cost, when its reader did start.
    """

    source: Action
    target: Action
    source_rank: int
    target_rank: int
    sent: float
    arrives: float


def transfers(
    schedule: Schedule, events: Sequence[Sequence[Timed]], cost: Cost | None
) -> Iterator[Transfer]:
    """Every value that crosses ranks, in the order of its readers, rank by rank."""
    positions = _producers(events)
    for rank, row in enumerate(events):
        for _, action, start, _ in row:
            source = _input(schedule, positions, action)
            if source is None or source[0] == rank:
                continue
            _, made, _, sent = events[source[0]][source[1]]
            arrives = start if cost is None else sent + cost.hop(source[0], rank)
            yield Transfer(made, action, source[0], rank, sent, arrives)


def critical_path(
    schedule: Schedule, events: Sequence[Sequence[Timed]], cost: Cost | None
) -> list[Position]:
    """Positions of the actions that the last end waited for, first to last.

    Walks back from the last end. An action waited for whichever came last: the end of the action
    before it on its rank, or its input. Linear in the number of actions.
    """
    positions = _producers(events)
    ends = [(row[-1][3], -rank) for rank, row in enumerate(events) if row]
    if not ends:
        return []
    rank = -max(ends)[1]
    here: Position | None = (rank, len(events[rank]) - 1)
    path: list[Position] = []
    while here is not None:
        path.append(here)
        rank, at = here
        source = _input(schedule, positions, events[rank][at][1])
        before = (rank, at - 1) if at else None
        if source is not None and before is not None:
            arrival = events[source[0]][source[1]][3]
            arrival += cost.hop(source[0], rank) if cost is not None else 0.0
            # On a tie the rank's own action: that path shows the work that fills the time.
            here = source if arrival > events[rank][at - 1][3] else before
        else:
            here = source or before
    return path[::-1]


def _producers(events: Sequence[Sequence[Timed]]) -> dict[tuple[int, bool, int | None], Position]:
    """Where each stage's output (forward or backward) of each microbatch was made."""
    return {
        (stage, op == Op.F, microbatch): (rank, at)
        for rank, row in enumerate(events)
        for at, (_, (stage, op, microbatch), _, _) in enumerate(row)
        if op == Op.F or op == Op.I or op == Op.B
    }


def _input(
    schedule: Schedule,
    producers: dict[tuple[int, bool, int | None], Position],
    action: Action,
) -> Position | None:
    """Where the input of `action` from its neighbour stage was made, if it has one."""
    stage, op, microbatch = action
    if op == Op.F:
        return producers.get((stage - 1, True, microbatch))
    if op == Op.W and (stage, False, microbatch) in producers:
        return None  # the I of its own stage hands it over
    return producers.get((stage + 1, False, microbatch))
