"""What each action waited for: messages between ranks, and the critical path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from fpipe.schedule.action import Action
from fpipe.schedule.cost import Cost
from fpipe.schedule.dependencies import chain, dependencies
from fpipe.schedule.timing.event import Event

Position: TypeAlias = tuple[int, int]  # rank, index in the rank's row
Events: TypeAlias = Sequence[Sequence[Event]]  # per rank, in the order in which it ran them


class Wait(NamedTuple):
    """What an action waited for last.

    Attributes:
        source: the action; None where it waited for nothing.
        ready: when that was there: its end, and the way to this rank.
    """

    source: Position | None
    ready: float


class Hop(NamedTuple):
    """A value that crosses from one rank to another: the actions that make and read it."""

    source: Position
    target: Position


class Transfer(NamedTuple):
    """A value that crosses from one rank to another, and its times.

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


def waits_of(
    events: Events, num_stages: int, cost: Cost | None
) -> tuple[list[list[Wait]], list[Hop]]:
    """Per rank what each action waited for, and every value that crosses ranks.

    An action waits for the end of the one before it on its rank, and for its inputs to arrive. On a
    tie it waited for its own rank: a path of such waits shows the work that fills the time. What
    took no time and was over before an input was there, has not read it: in a real step it had
    nothing to compute.

    Args:
        events: what each rank ran.
        num_stages: number of stages.
        cost: latencies between ranks; None where they are unknown, and taken as 0.

    Returns:
        The waits in the order of the rows; the messages in the order of their readers.
    """
    graph = dependencies([[event.action for event in row] for row in events], chain(num_stages))
    begun = min((row[0].start for row in events if row), default=0.0)
    found: list[list[Wait]] = []
    messages: list[Hop] = []
    for rank, row in enumerate(events):
        found.append([])
        for at in range(len(row)):
            source: Position | None = None
            ready = begun
            if at:
                source, ready = (rank, at - 1), row[at - 1].end
            for need in graph.needs[graph.starts[rank] + at]:
                place = graph.place(need)
                arrival = events[place[0]][place[1]].end
                if row[at].start == row[at].end < arrival:
                    continue
                if place[0] != rank:
                    messages.append(Hop(place, (rank, at)))
                    arrival += cost.hop(place[0], rank) if cost is not None else 0.0
                if source is None or arrival > ready:
                    source, ready = place, arrival
            found[-1].append(Wait(source, ready))
    return found, messages


def critical_path(events: Events, num_stages: int, cost: Cost | None) -> list[Position]:
    """Positions of the actions that the last end waited for, first to last."""
    ends = [(row[-1].end, -rank) for rank, row in enumerate(events) if row]
    if not ends:
        return []
    found, _ = waits_of(events, num_stages, cost)
    rank = -max(ends)[1]
    here: Position | None = (rank, len(events[rank]) - 1)
    path: list[Position] = []
    while here is not None:
        path.append(here)
        here = found[here[0]][here[1]].source
    return path[::-1]


def transfers(events: Events, num_stages: int, cost: Cost | None) -> Iterator[Transfer]:
    """Every value that crosses ranks, in the order of its readers, rank by rank."""
    for source, target in waits_of(events, num_stages, cost)[1]:
        source_rank, made, _, sent = events[source[0]][source[1]]
        target_rank, read, start, _ = events[target[0]][target[1]]
        arrives = start if cost is None else sent + cost.hop(source_rank, target_rank)
        yield Transfer(made, read, source_rank, target_rank, sent, arrives)
