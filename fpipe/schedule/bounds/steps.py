"""How a part of a pipeline goes on, one action at a time: the states of all its schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from fpipe.schedule.bounds.part import Part

# How many F, I and W each stage has done: what a rank holds, and what is left, follow from it.
Counts: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
Queues: TypeAlias = tuple[tuple[float, ...], ...]
Step: TypeAlias = tuple[int, int]  # 0, 1 or 2 for F, I or W; the index of the stage in the part


class State(NamedTuple):
    """The times that decide how a part can go on from its counts. To be earlier is no worse.

    Attributes:
        clocks: when each rank is free, and no earlier than the start of the last action.
        forwards: per stage, when the microbatches arrive whose F it has not run.
        gradients: per stage, when the gradients arrive whose I it has not run.
        end: when the last gradient has travelled on to the first stage of the pipeline.
    """

    clocks: tuple[float, ...]
    forwards: Queues
    gradients: Queues
    end: float

    def times(self) -> tuple[float, ...]:
        """All of it in one row; states of equal counts have rows of equal length."""
        row = (self.end, *self.clocks)
        for queue in self.forwards:
            row += queue
        for queue in self.gradients:
            row += queue
        return row


def beginning(part: Part) -> tuple[Counts, State]:
    """The state before the first action, and its counts."""
    none, empty = (0,) * len(part.stages), ((),) * len(part.stages)
    return (none, none, none), State((0.0,) * len(part.memory), empty, empty, 0.0)


def work_left(part: Part, counts: Counts, microbatches: int) -> list[float]:
    """What each rank of the part has still to compute."""
    return [
        sum(
            (microbatches - done[at]) * times[at]
            for done, times in zip(counts, part.durations, strict=True)
            for at in own
        )
        for own in part.own
    ]


def possible(part: Part, counts: Counts, microbatches: int) -> list[Step]:
    """The actions for which the counts leave room: results are made, memory is there.

    Forwards that would lead into a dead end are left out.
    """
    took, returned, closed = counts
    steps = []
    held = [
        sum(
            part.kept[at] * (took[at] - closed[at]) - part.freed[at] * (returned[at] - closed[at])
            for at in own
        )
        for own in part.own
    ]
    last = len(took) - 1
    for at, rank in enumerate(part.rank_of):
        if returned[at] < (took[at] if at == last else returned[at + 1]):
            steps.append((1, at))
        if closed[at] < returned[at]:
            steps.append((2, at))
        if took[at] < (took[at - 1] if at else microbatches):
            limit = part.memory[rank] * (1 + 1e-9)
            if held[rank] + part.kept[at] <= limit and (
                len(own := part.own[rank]) == 1 or needed_later(own, part.kept, took, at) <= limit
            ):
                steps.append((0, at))
    return steps


def needed_later(own: Sequence[int], kept: Sequence[float], took: Sequence[int], at: int) -> float:
    """What a rank must hold some time after a forward of one of its stages, in any schedule.

    When the first microbatch that lacks the rank's last forward comes to it, it holds an activation
    of every stage, and so do all younger ones of the stages that they have been through, because no
    gradient comes back before. What is older frees all of its memory in time.

    Args:
        own: the rank's stages, in order.
        kept: per stage, what F keeps.
        took: per stage, how many F are done.
        at: the stage of the forward.
    """
    oldest = took[own[-1]] + (at == own[-1])
    return sum(kept[each] * max(1, took[each] + (at == each) - oldest) for each in own)


def after(part: Part, state: State, steps: list[Step], final: bool) -> Iterator[tuple[Step, State]]:
    """Each of the steps that are `possible`, and the state after it.

    Actions are taken in the order of their starts. An I or a W that would be over before another
    action starts goes first: it delays nothing and frees memory, so nothing is lost.

    Args:
        part: the part.
        state: where it stands.
        steps: what can be done.
        final: whether all but one I of the first stage are done.
    """
    clocks, forwards, gradients, end = state
    choices = []
    soonest = float("inf")
    for kind, at in steps:
        start = clocks[part.rank_of[at]]
        if kind == 1 and gradients[at][0] > start:
            start = gradients[at][0]
        elif kind == 0 and at and forwards[at][0] > start:
            start = forwards[at][0]
        ends = start + part.durations[kind][at]
        choices.append((start, ends, kind, at))
        if kind and ends < soonest:
            soonest = ends
    for start, ends, kind, at in choices:
        if soonest <= start and any(
            other and over <= start and begun < start for begun, over, other, _ in choices
        ):
            continue
        rank, new_forwards, new_gradients, new_end = part.rank_of[at], forwards, gradients, end
        if kind == 0:
            arrival = ends + part.forward_delay[at]
            if at:
                new_forwards = (*forwards[:at], forwards[at][1:], *forwards[at + 1 :])
            if at + 1 < len(forwards):
                queue = (*new_forwards[at + 1], arrival)
                new_forwards = (*new_forwards[: at + 1], queue, *new_forwards[at + 2 :])
            else:
                new_gradients = (*gradients[:at], (*gradients[at], arrival))
        elif kind == 1:
            new_gradients = (*gradients[:at], gradients[at][1:], *gradients[at + 1 :])
            if at:
                queue = (*gradients[at - 1], ends + part.backward_delay[at])
                new_gradients = (*new_gradients[: at - 1], queue, *new_gradients[at:])
            elif final:
                new_end = ends + part.tail
        free = [clock if clock > start else start for clock in clocks]
        free[rank] = ends
        # What arrives before its rank is free might as well arrive then: so states come to agree.
        floors = [free[owner] for owner in part.rank_of]
        yield (
            (kind, at),
            State(
                tuple(free),
                _raised(new_forwards, floors),
                _raised(new_gradients, floors),
                new_end,
            ),
        )


def counted(counts: Counts, step: Step) -> Counts:
    """The counts after a step."""
    kind, at = step
    row = counts[kind]
    row = (*row[:at], row[at] + 1, *row[at + 1 :])
    took, returned, closed = counts
    if kind == 0:
        return row, returned, closed
    return (took, row, closed) if kind == 1 else (took, returned, row)


def _raised(queues: Queues, floors: list[float]) -> Queues:
    return tuple(
        queue
        if not queue or queue[0] >= floor
        else tuple([time if time > floor else floor for time in queue])
        for queue, floor in zip(queues, floors, strict=True)
    )
