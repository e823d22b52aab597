"""The dependency graph of a schedule, and the earliest start of each action."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fpipe.schedule.action import Action, Op


@dataclass(frozen=True)
class Dependencies:
    """The actions of all ranks in one list, rank after rank, and the actions that each one needs.

    Attributes:
        actions: all actions; `needs` refers to positions in this tuple.
        starts: per rank, the number of its first action; one more entry closes the last rank.
        needs: per action, the numbers of the actions whose results it reads. Inputs that no action
            of the schedule makes are left out; the verifier looks for those.
    """

    actions: tuple[Action, ...]
    starts: tuple[int, ...]
    needs: tuple[tuple[int, ...], ...]

    def run_order(self) -> Iterator[int]:
        """The numbers of the actions in an order in which they can run; shorter if ranks deadlock.

        Each rank runs its actions in order, and a result is there for every reader once it is
        made: sends do not block, and a message that comes early is kept. Each rank is run until it
        is blocked and taken up again by the action that it waits for, so the whole takes time
        linear in actions and needs.
        """
        done = bytearray(len(self.actions))
        at = list(self.starts[:-1])
        waiting: dict[int, list[int]] = {}  # action -> ranks that wait for it
        free = list(reversed(range(len(at))))
        while free:
            rank = free.pop()
            end = self.starts[rank + 1]
            for number in range(at[rank], end):
                missing = [need for need in self.needs[number] if not done[need]]
                if missing:
                    at[rank] = number
                    waiting.setdefault(missing[0], []).append(rank)
                    break
                done[number] = 1
                yield number
                free += waiting.pop(number, ())
            else:
                at[rank] = end

    def place(self, number: int) -> tuple[int, int]:
        """The rank that runs this action, and the position in its row."""
        rank = bisect_right(self.starts, number) - 1
        return rank, number - self.starts[rank]


def dependencies(rows: Sequence[Sequence[Action]]) -> Dependencies:
    """The dependency graph of the rows of a schedule.

    A forward needs the forward of the stage before. A backward needs the forward of its stage and
    the backward of the stage after. W needs I; where a stage has W and no I, W is itself the
    backward. Whole-stage actions need nothing.

    Example:
        >>> graph = dependencies([[Action(0, Op.F, 0)], [Action(1, Op.F, 0)]])
        >>> graph.needs
        ((), (0,))
        >>> list(graph.run_order())
        [0, 1]
    """
    actions = tuple(action for row in rows for action in row)
    starts = (0, *accumulate(len(row) for row in rows))
    forwards: dict[tuple[int, int | None], int] = {}
    cotangents: dict[tuple[int, int | None], int] = {}  # outputs of B or I
    for number, (stage, op, microbatch) in enumerate(actions):
        if op == Op.F:
            forwards[stage, microbatch] = number
        elif op in (Op.B, Op.I):
            cotangents[stage, microbatch] = number

    needs: list[tuple[int, ...]] = []
    for stage, op, microbatch in actions:
        inputs: list[int | None] = []
        if op == Op.F:
            inputs = [forwards.get((stage - 1, microbatch))]
        elif op == Op.W and (stage, microbatch) in cotangents:
            inputs = [cotangents[stage, microbatch]]
        elif op in (Op.B, Op.I, Op.W):
            # The input of the same rank first: an error then names the nearest fault.
            inputs = [forwards.get((stage, microbatch)), cotangents.get((stage + 1, microbatch))]
        needs.append(tuple(number for number in inputs if number is not None))
    return Dependencies(actions, starts, tuple(needs))


def earliest_starts(
    rows: Sequence[Sequence[Action]], num_stages: int, lengths: Mapping[str, float]
) -> list[list[float]] | None:
    """Per rank, the start of each action, once its rank is free and its inputs are there.

    Sending takes no time, and neither does an op without a length. The starts are in the order of
    the rows; None if some action can never start.

    Example:
        >>> rows = [[Action.parse("0F0"), Action.parse("0B0")], [Action.parse("1F0")]]
        >>> earliest_starts(rows, 2, {"F": 1, "B": 2})
        [[0.0, 1.0], [1.0]]
    """
    if any(not 0 <= action.stage < num_stages for row in rows for action in row):
        return None
    graph = dependencies(rows)
    ends = [0.0] * len(graph.actions)
    starts: list[list[float]] = [[] for _ in rows]
    for number in graph.run_order():
        rank, position = graph.place(number)
        free = ends[number - 1] if position else 0.0
        start = max([free, *(ends[need] for need in graph.needs[number])])
        ends[number] = start + lengths.get(graph.actions[number].op, 0)
        starts[rank].append(start)
    return starts if sum(map(len, starts)) == len(ends) else None
