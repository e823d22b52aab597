"""The states of all schedules of a subpipeline, one action at a time.

A state is a tuple of times, and to be earlier in any of them is no worse: when the last gradient
reaches the first stage of the pipeline; when each rank is free, and no earlier than the start of
the last action; when the inputs arrive that are made and not yet read, of forwards stage after
stage, then of gradients. Counts say how many of them there are, so states of equal counts are
tuples of equal length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

from fpipe.schedule.bounds.subpipeline import Subpipeline

# How many F, I and W each stage has done, a B as both: memory held and work left follow.
Counts: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
State: TypeAlias = tuple[float, ...]

FORWARD, GRADIENT, WEIGHT, WHOLE = range(4)  # F, I, W and B: the kinds of steps
_ROWS = ((0,), (1,), (2,), (1, 2))  # the counts that each kind adds to


class Step(NamedTuple):
    """An action for which some counts leave room, and how it changes a state of those counts.

    Attributes:
        kind: of the action.
        at: the index of its stage.
        rank: the index of its rank.
        duration: its time.
        early: it delays nothing and frees memory where its rank has nothing else to do.
        takes: the place in the state of the arrival that it waits for, or -1.
        makes: the place of its output among the arrivals once that one is gone, or -1.
        delay: from its end to the arrival of its output.
        owners: the index of the rank of each arrival in the states after it.
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


def prefix_sums(sizes: Sequence[float]) -> tuple[float, ...]:
    """The size of the first k microbatches together, for each k from 0."""
    return tuple(accumulate(sizes, initial=0.0))


def initial_state(pipe: Subpipeline) -> tuple[Counts, State]:
    """The state before the first action, and its counts."""
    none = (0,) * len(pipe.stages)
    return (none, none, none), (0.0,) * (1 + len(pipe.memory))


def work_left(pipe: Subpipeline, counts: Counts, sums: Sequence[float]) -> list[float]:
    """The time that each rank has still to compute."""
    f_done, i_done, w_done = counts
    total, (forward, _, weight, _), full = sums[-1], pipe.durations, pipe.full
    return [
        sum(
            (total - sums[f_done[at]]) * forward[at]
            + (total - sums[i_done[at]]) * full[at]
            + (sums[i_done[at]] - sums[w_done[at]]) * weight[at]
            for at in stages
        )
        for stages in pipe.stages_of
    ]


def possible_steps(
    pipe: Subpipeline, counts: Counts, sums: Sequence[float], amounts: Sequence[float]
) -> list[Step]:
    """The actions for which the counts leave room: inputs are made, memory is there.

    Forwards that would lead into a dead end are left out. Every stage takes the microbatches in
    their order.

    The `sums` are of the sizes of the microbatches (see `prefix_sums`), and `amounts` of what they
    keep.
    """
    f_done, i_done, w_done = counts
    ranks, last, rank_of = len(pipe.memory), len(f_done) - 1, pipe.rank_of
    forwards = [0, *(before - here for before, here in pairwise(f_done))]
    gradients = [*(later - here for here, later in pairwise(i_done)), f_done[-1] - i_done[-1]]
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
        over = amounts[w_done[at]]
        held[rank] += pipe.kept[at] * (amounts[f_done[at]] - over)
        held[rank] -= pipe.freed[at] * (amounts[i_done[at]] - over)
    steps = []

    def add(kind: int, at: int, done: int, takes: int, makes: int, delay: float) -> None:
        """Append a step; `takes` and `makes` are places among the arrivals."""
        left, following = owners, counts
        if takes >= 0:
            left = [*left[:takes], *left[takes + 1 :]]
        if makes >= 0:
            reader = at - 1 if kind != FORWARD else min(at + 1, last)
            left = [*left[:makes], rank_of[reader], *left[makes:]]
        for row in _ROWS[kind]:
            each = following[row]
            each = (*each[:at], each[at] + 1, *each[at + 1 :])
            following = (*following[:row], each, *following[row + 1 :])  # type: ignore[assignment]
        size = sums[done + 1] - sums[done]
        closes = kind in (GRADIENT, WHOLE) and at == 0 and done == len(sums) - 2
        steps.append(
            Step(
                kind,
                at,
                rank_of[at],
                pipe.durations[kind][at] * size,
                kind in (WEIGHT, WHOLE) or (kind == GRADIENT and pipe.eager[at]),
                takes + 1 + ranks if takes >= 0 else -1,
                makes,
                delay,
                tuple(left),
                pipe.tail if closes else -1.0,
                following,
            )
        )

    for at, rank in enumerate(rank_of):
        limit = pipe.memory[rank] * (1 + 1e-9)
        back = i_done[at]
        if gradients[at]:
            takes = offsets[last + 1 + at]
            size = amounts[back + 1] - amounts[back]
            for kind in pipe.backwards[at]:
                if kind == WHOLE or held[rank] - pipe.freed[at] * size <= limit:
                    add(kind, at, back, takes, takes if at else -1, pipe.backward_delay[at])
        if w_done[at] < back:
            add(WEIGHT, at, w_done[at], -1, -1, 0.0)
        here = f_done[at]
        if forwards[at] if at else here < len(sums) - 1:
            size = amounts[here + 1] - amounts[here]
            if held[rank] + pipe.kept[at] * size <= limit and (
                len(stages := pipe.stages_of[rank]) == 1
                or needed_later(stages, pipe.kept, f_done, at, amounts) <= limit
            ):
                makes = offsets[at + 2 if at < last else 2 * last + 2] - (at > 0)
                add(FORWARD, at, here, offsets[at] if at else -1, makes, pipe.forward_delay[at])
    return steps


def needed_later(
    stages: Sequence[int],
    kept: Sequence[float],
    f_done: Sequence[int],
    at: int,
    sums: Sequence[float],
) -> float:
    """The memory that a rank needs some time after a forward, in any schedule.

    When the first microbatch that lacks the rank's last forward comes to it, it holds an activation
    of every stage, and so do all younger ones of the stages that they have been through, because no
    gradient comes back before. Older microbatches free all of their memory in time.

    The forward is that of the stage `at`; `sums` are of what the microbatches keep, as shares of
    `kept`.
    """
    oldest = min(f_done[stages[-1]] + (at == stages[-1]), len(sums) - 2)
    since = sums[oldest]
    return sum(
        kept[each] * (sums[max(oldest + 1, f_done[each] + (at == each))] - since) for each in stages
    )


def successors(ranks: int, state: State, steps: list[Step]) -> Iterator[tuple[int, State]]:
    """The index of each possible step, and the state after it.

    Actions are taken in the order of their starts. A backward that delays nothing and would be over
    before another action starts goes first, so nothing is lost.
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
        # An arrival before its rank is free might as well come then: so states come to agree.
        floors = [free[owner] for owner in step.owners]
        gradient = ends + step.tail if step.tail >= 0 else state[0]
        yield nth, (gradient, *free, *map(max, rest, floors))
