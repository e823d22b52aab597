"""Find the circle in which ranks wait for each other."""

from __future__ import annotations

from collections.abc import Sequence

from fpipe.errors import ScheduleError
from fpipe.schedule.dependencies import Dependencies


def check_order(graph: Dependencies) -> None:
    """Refuse rows that cannot run to their end because ranks wait for each other in a circle.

    Raises:
        ScheduleError: naming every action of the circle, its rank and what it waits for. A circle
            of one rank is an action that stands before one whose result it reads.

    Example:
        >>> from fpipe.schedule.action import Action
        >>> from fpipe.schedule.dependencies import chain, dependencies
        >>> rows = [[Action.parse("0B0"), Action.parse("0F0")]]
        >>> check_order(dependencies(rows, chain(1)))
        Traceback (most recent call last):
        ...
        fpipe.errors.ScheduleError: rank 0 runs 0B0 (actions[0][0]) before 0F0 (actions[0][1]), \
whose result it reads: move 0F0 before it
    """
    ran = bytearray(len(graph.actions))
    for number in graph.run_order():
        ran[number] = 1
    if all(ran):
        return
    # Each stuck rank waits for an action of a stuck rank, so whoever follows them comes round.
    stuck = next(number for number, done in enumerate(ran) if not done)
    seen: dict[int, int] = {}  # an action at which a rank is stuck -> what it waits for
    while stuck not in seen:
        seen[stuck] = next(need for need in graph.needs[stuck] if not ran[need])
        rank, _ = graph.place(seen[stuck])
        stuck = ran.index(0, graph.starts[rank])
    raise ScheduleError(_circle(graph, list(seen.items())[list(seen).index(stuck) :]))


def _circle(graph: Dependencies, waits: Sequence[tuple[int, int]]) -> str:
    """The error text for actions that wait for each other, each with what it waits for."""

    def at(number: int) -> str:
        rank, position = graph.place(number)
        return f"{graph.actions[number]} (actions[{rank}][{position}])"

    if len(waits) == 1:
        action, need = waits[0]
        return (
            f"rank {graph.place(action)[0]} runs {at(action)} before {at(need)}, whose result it "
            f"reads: move {graph.actions[need]} before it"
        )
    steps = [
        f"rank {graph.place(action)[0]} stops at {at(action)}, which reads {at(need)}"
        for action, need in waits
    ]
    return (
        "the ranks wait for each other in a circle, so none can go on: "
        + "; ".join(steps)
        + ". Move one of the actions that are read before the one at which its rank stops"
    )
