"""All schedules of a few ranks at once, where memory is so scarce that there are not many."""

from __future__ import annotations

from collections.abc import Collection
from operator import le
from typing import NamedTuple

from fpipe.schedule.bounds.part import Part
from fpipe.schedule.bounds.steps import Counts, State, after, beginning, counted, possible


class Diagram(NamedTuple):
    """What a walk through the states of a part found.

    Attributes:
        bound: no schedule of the part, and so none of the pipeline, ends earlier; 0 if given up.
        states: how many were looked at.
        exact: no states were merged, so that a schedule of the part does end then.
    """

    bound: float
    states: int
    exact: bool


def walk(part: Part, microbatches: int, width: int, budget: int) -> Diagram:
    """The least time in which a part can run, or less, by going through the states it can be in.

    Microbatches are alike, so it is enough to look at schedules in which every stage takes them in
    order (the k-th F of a stage needs k F's of the stage before, whichever they are; memory depends
    on counts alone). The states after n actions make a layer. Of two states with the same counts,
    one that is later in every respect is dropped; and where more than `width` are left, neighbours
    are merged into one that is as early as either in every respect, which can do whatever they can:
    a relaxed decision diagram (Andersen, Hadzic, Hooker and Tiedemann, CP 2007).

    Args:
        part: the ranks to look at.
        microbatches: their number.
        width: the most states to keep of equal counts.
        budget: give up once more states than this are likely to be looked at.
    """
    counts, state = beginning(part)
    layer: dict[Counts, list[State]] = {counts: [state]}
    looked, exact = 0, True
    layers = 3 * len(part.stages) * microbatches
    for turn in range(layers):
        size = sum(map(len, layer.values()))
        if looked + size * (layers - turn) > 2 * budget or looked > budget:
            return Diagram(0.0, looked, False)
        looked += size
        found: dict[Counts, set[State]] = {}
        for counts, states in layer.items():
            steps = possible(part, counts, microbatches)
            targets = {step: found.setdefault(counted(counts, step), set()) for step in steps}
            final = counts[1][0] == microbatches - 1
            for state in states:
                for step, following in after(part, state, steps, final):
                    targets[step].add(following)
        layer = {}
        for counts, reached in found.items():
            if reached:
                states = undominated(reached)
                if len(states) > width:
                    states, exact = _merged(states, width), False
                layer[counts] = states
    ends = [max(*state.clocks, state.end) for states in layer.values() for state in states]
    return Diagram(part.release + min(ends), looked, exact)


def undominated(states: Collection[State]) -> list[State]:
    """The states of which no other is earlier in every respect, from early to late."""
    if len(states) == 1:
        return list(states)
    rows = sorted((sum(times := state.times()), times, state) for state in states)
    kept: list[tuple[float, ...]] = []
    result = []
    for _, times, state in rows:
        for other in kept:
            if all(map(le, other, times)):
                break
        else:
            kept.append(times)
            result.append(state)
    return result


def _merged(states: list[State], width: int) -> list[State]:
    """At most `width` states: runs of neighbours, each merged into one."""
    size = len(states)
    groups = [states[at * size // width : (at + 1) * size // width] for at in range(width)]
    return undominated({_earliest(group) for group in groups})


def _earliest(group: list[State]) -> State:
    if len(group) == 1:
        return group[0]
    clocks, forwards, gradients, end = zip(*group, strict=True)
    return State(
        tuple(map(min, *clocks)),
        tuple(tuple(map(min, *queues)) for queues in zip(*forwards, strict=True)),
        tuple(tuple(map(min, *queues)) for queues in zip(*gradients, strict=True)),
        min(end),
    )
