"""How a part of a pipeline goes on, one action at a time: the states of all its schedules.

A state is a row of times, and to be earlier in any of them is no worse: when the last gradient has
travelled on to the first stage of the pipeline; when each rank is free, and no earlier than the
start of the last action; when the inputs arrive that are made and not read, of forwards stage after
stage, then of gradients. Counts say how many of them there are, so that states of equal counts are
rows of equal length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

from fpipe.schedule.bounds.subpipeline import Part

# How many F, I and W each stage has done, a B as both: what a rank holds, and what is left, follow.
Counts: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
State: TypeAlias = tuple[float, ...]

FORWARD, GRADIENT, WEIGHT, WHOLE = range(4)  # F, I, W and B: the kinds of steps
_ROWS = ((0,), (1,), (2,), (1, 2))  # the counts that each kind adds to


class Step(NamedTuple):
    """An action for which some counts leave room, and how it changes a state of those counts.

    Attributes:
        kind: of the action.
        at: the index of its stage in the part.
        rank: the index of its rank in the part.
        duration: its time.
        early: it delays nothing and frees memory where its rank has nothing else to do.
        takes: where the arrival that it waits for stands in the state, or -1.
        makes: where among the arrivals its own output comes to stand once that is gone, or -1.
        delay: from its end to the arrival of its output.
        owners: of the arrivals in the states after it, the index of the rank of each.
        tail: from its end to the end of the step, if it is the last gradient; else negative.
        counts: after it.
    """

    kind: int
    at: int
    rank: int
    duration: float
    early: bool
    takes: int
    makes: int
    delay: float
    owners: tuple[int, ...]
    tail: float
    counts: Counts


def sums_of(sizes: Sequence[float]) -> tuple[float, ...]:
    """The size of the first k microbatches together, for each k, as the functions here want it."""
    return tuple(accumulate(sizes, initial=0.0))


def beginning(part: Part) -> tuple[Counts, State]:
    """The state before the first action, and its counts."""
    none = (0,) * len(part.stages)
    return (none, none, none), (0.0,) * (1 + len(part.memory))


def work_left(part: Part, counts: Counts, sums: Sequence[float]) -> list[float]:
    """What each rank of the part has still to compute."""
    took, returned, closed = counts
    total, (forward, _, weight, _), full = sums[-1], part.durations, part.full
    return [
        sum(
            (total - sums[took[at]]) * forward[at]
            + (total - sums[returned[at]]) * full[at]
            + (sums[returned[at]] - sums[closed[at]]) * weight[at]
            for at in own
        )
        for own in part.own
    ]


def possible(part: Part, counts: Counts, sums: Sequence[float]) -> list[Step]:
    """The actions for which the counts leave room: results are made, memory is there.

    Forwards that would lead into a dead end are left out. Every stage takes the microbatches in
    their order.
    """
    took, returned, closed = counts
    ranks, last, rank_of = len(part.memory), len(took) - 1, part.rank_of
    forwards = [0, *(before - here for before, here in pairwise(took))]
    gradients = [*(later - here for here, later in pairwise(returned)), took[-1] - returned[-1]]
    # Where the arrivals of each stage begin, and which rank each is for.
    offsets = list(accumulate(forwards + gradients, initial=0))
    owners = [
        rank
        for queues in (forwards, gradients)
        for rank, n in zip(rank_of, queues, strict=True)
        for _ in range(n)
    ]
    held = [0.0] * ranks
    for at, rank in enumerate(rank_of):
        over = sums[closed[at]]
        held[rank] += part.kept[at] * (sums[took[at]] - over)
        held[rank] -= part.freed[at] * (sums[returned[at]] - over)
    steps = []

    def add(kind: int, at: int, done: int, takes: int, makes: int, delay: float) -> None:
        """Append a step; `takes` and `makes` are places among the arrivals."""
        left, after = owners, counts
        if takes >= 0:
            left = [*left[:takes], *left[takes + 1 :]]
        if makes >= 0:
            reader = at - 1 if kind != FORWARD else min(at + 1, last)
            left = [*left[:makes], rank_of[reader], *left[makes:]]
        for row in _ROWS[kind]:
            each = after[row]
            each = (*each[:at], each[at] + 1, *each[at + 1 :])
            after = (*after[:row], each, *after[row + 1 :])  # type: ignore[assignment]
        size = sums[done + 1] - sums[done]
        closes = kind in (GRADIENT, WHOLE) and at == 0 and done == len(sums) - 2
        steps.append(
            Step(
                kind,
                at,
                rank_of[at],
                part.durations[kind][at] * size,
                kind in (WEIGHT, WHOLE) or (kind == GRADIENT and part.eager[at]),
                takes + 1 + ranks if takes >= 0 else -1,
                makes,
                delay,
                tuple(left),
                part.tail if closes else -1.0,
                after,
            )
        )

    for at, rank in enumerate(rank_of):
        limit = part.memory[rank] * (1 + 1e-9)
        back = returned[at]
        if gradients[at]:
            takes = offsets[last + 1 + at]
            size = sums[back + 1] - sums[back]
            for kind in part.backwards[at]:
                if kind == WHOLE or held[rank] - part.freed[at] * size <= limit:
                    add(kind, at, back, takes, takes if at else -1, part.backward_delay[at])
        if closed[at] < back:
            add(WEIGHT, at, closed[at], -1, -1, 0.0)
        here = took[at]
        if forwards[at] if at else here < len(sums) - 1:
            size = sums[here + 1] - sums[here]
            if held[rank] + part.kept[at] * size <= limit and (
                len(own := part.own[rank]) == 1
                or needed_later(own, part.kept, took, at, sums) <= limit
            ):
                makes = offsets[at + 2 if at < last else 2 * last + 2] - (at > 0)
                add(FORWARD, at, here, offsets[at] if at else -1, makes, part.forward_delay[at])
    return steps


def needed_later(
    own: Sequence[int],
    kept: Sequence[float],
    took: Sequence[int],
    at: int,
    sums: Sequence[float],
) -> float:
    """What a rank must hold some time after a forward of one of its stages, in any schedule.

    When the first microbatch that lacks the rank's last forward comes to it, it holds an activation
    of every stage, and so do all younger ones of the stages that they have been through, because no
    gradient comes back before. What is older frees all of its memory in time.

    Args:
        own: the rank's stages, in order.
        kept: per stage, what F keeps.
        took: per stage, how many F are done.
        at: the stage of the forward.
        sums: of the sizes of the microbatches.
    """
    oldest = min(took[own[-1]] + (at == own[-1]), len(sums) - 2)
    since = sums[oldest]
    return sum(
        kept[each] * (sums[max(oldest + 1, took[each] + (at == each))] - since) for each in own
    )


def after(ranks: int, state: State, steps: list[Step]) -> Iterator[tuple[int, State]]:
    """The index of each of the steps that are `possible`, and the state after it.

    Actions are taken in the order of their starts. A backward that delays nothing and would be over
    before another action starts goes first, so nothing is lost.

    Args:
        ranks: of the part.
        state: where it stands.
        steps: what can be done.
    """
    clocks = state[1 : ranks + 1]
    choices = []
    soonest = float("inf")
    for step in steps:
        start = state[step.takes] if step.takes >= 0 else clocks[step.rank]
        ends = start + step.duration
        choices.append((start, ends, step))
        if step.early and ends < soonest:
            soonest = ends
    for nth, (start, ends, step) in enumerate(choices):
        if soonest <= start and any(
            other.early and over <= start and begun < start for begun, over, other in choices
        ):
            continue
        takes, makes = step.takes, step.makes
        rest = state[ranks + 1 : takes] + state[takes + 1 :] if takes >= 0 else state[ranks + 1 :]
        if makes >= 0:
            rest = (*rest[:makes], ends + step.delay, *rest[makes:])
        free = [clock if clock > start else start for clock in clocks]
        free[step.rank] = ends
        # What arrives before its rank is free might as well arrive then: so states come to agree.
        floors = [free[owner] for owner in step.owners]
        yield (
            nth,
            (
                ends + step.tail if step.tail >= 0 else state[0],
                *free,
                *map(max, rest, floors),
            ),
        )
