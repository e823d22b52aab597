"""All schedules of a few ranks at once, where memory is so scarce that there are not many."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from operator import le
from typing import NamedTuple

from fpipe.schedule.bounds.states import WHOLE, Counts, State, after, beginning, possible, sums_of
from fpipe.schedule.bounds.subpipeline import Part, part_of
from fpipe.schedule.cost import StageCosts

_WIDTH = 2  # states kept of equal counts, at first


def scarce_bound(
    costs: StageCosts,
    placement: Sequence[int],
    microbatches: int,
    memory: Sequence[float],
    *,
    span: bool,
    likely: int,
    effort: int,
) -> float:
    """The bound of the schedules of a few ranks, for which the others have nothing else to do.

    One rank is looked at alone, exactly, or with states merged where there are many (see
    `bounds.diagram`): the first, the last and the `likely` one. The best of them is joined by its
    neighbours, one after the other, as far as the effort goes; what is left of it goes into merging
    less. A span is that of one rank, whatever the others do.

    Args:
        costs: of each stage.
        placement: the rank of each stage.
        microbatches: their number.
        memory: the limit of each rank.
        span: bound the longest rank's own time instead of the makespan.
        likely: the rank that limits the others most, by other bounds.
        effort: about as many states are looked at.
    """
    ranks, spent = sorted({*placement}), 0  # those that have a stage
    beside = {rank: {ranks[at - 1], ranks[at + 1 - len(ranks)]} for at, rank in enumerate(ranks)}

    def bound(chosen: tuple[int, ...], width: int, budget: int) -> tuple[float, bool]:
        nonlocal spent
        part = part_of(costs, placement, memory, chosen)
        if span:
            part = replace(part, release=0.0, tail=0.0)
        weight = max(1.0, len(part.stages) / 3)  # a state of many stages takes longer
        diagram = walk(part, microbatches, width, round(budget / weight))
        spent += round(diagram.states * weight)
        return diagram.bound, diagram.exact

    alone: dict[tuple[int, ...], tuple[float, bool]] = {
        (rank,): bound((rank,), _WIDTH, effort // 4)
        for rank in sorted({likely, ranks[0], ranks[-1]})
    }
    chosen = max(alone, key=lambda ranks: alone[ranks][0])
    (best, exact), width = alone[chosen], _WIDTH
    while best and not span and len(chosen) < len(ranks):
        joined = {
            tuple(sorted({*chosen, other})) for rank in chosen for other in beside[rank] - {*chosen}
        }
        found = {ranks: bound(ranks, _WIDTH, effort - spent) for ranks in sorted(joined)}
        larger = max(found, key=lambda ranks: found[ranks][0])
        if not found[larger][0]:
            break
        chosen, exact = larger, found[larger][1]
        best = max(best, found[larger][0])
    while best and not exact and spent < effort:
        width *= 4
        value, exact = bound(chosen, width, effort - spent)
        if not value:
            break
        best = max(best, value)
    return best


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
    sums, ranks = sums_of((1.0,) * microbatches), len(part.memory)
    # By how many F, I and W are done: a B is two of them.
    layers: list[dict[Counts, set[State]]] = [
        {} for _ in range(3 * len(part.stages) * microbatches)
    ]
    layers.append({})
    layers[0][counts] = {state}
    looked, exact = 0, True
    for turn in range(len(layers) - 1):
        kept: dict[Counts, list[State]] = {}
        for counts, reached in layers[turn].items():
            states = undominated(reached)
            if len(states) > width:
                states, exact = _merged(states, width), False
            kept[counts] = states
        layers[turn] = {}
        size = sum(map(len, kept.values()))
        if looked + size * (len(layers) - 1 - turn) > 2 * budget or looked > budget:
            return Diagram(0.0, looked, False)
        looked += size
        for counts, states in kept.items():
            steps = possible(part, counts, sums)
            targets = [
                layers[turn + 1 + (step.kind == WHOLE)].setdefault(step.counts, set())
                for step in steps
            ]
            for state in states:
                for nth, following in after(ranks, state, steps):
                    targets[nth].add(following)
    ends = [max(state[: ranks + 1]) for states in layers[-1].values() for state in states]
    return Diagram(part.release + min(ends), looked, exact)


def undominated(states: Collection[State]) -> list[State]:
    """The states of which no other is earlier in every respect, from early to late."""
    if len(states) == 1:
        return list(states)
    kept: list[State] = []
    for _, state in sorted((sum(state), state) for state in states):
        for other in kept:
            if all(map(le, other, state)):
                break
        else:
            kept.append(state)
    return kept


def _merged(states: list[State], width: int) -> list[State]:
    """At most `width` states: runs of neighbours, each merged into one."""
    size = len(states)
    groups = [states[at * size // width : (at + 1) * size // width] for at in range(width)]
    return undominated(
        {group[0] if len(group) == 1 else tuple(map(min, *group)) for group in groups}
    )
