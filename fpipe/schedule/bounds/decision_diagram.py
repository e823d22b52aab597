"""The best schedule of a few ranks, where memory is so scarce that there are not many schedules."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from operator import le
from typing import NamedTuple

from fpipe.schedule.bounds.states import (
    WHOLE,
    Counts,
    State,
    initial_state,
    possible_steps,
    prefix_sums,
    successors,
)
from fpipe.schedule.bounds.subpipeline import Subpipeline, cut_subpipeline
from fpipe.schedule.stage_costs import StageCosts

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

    One rank is searched alone, exactly or with states merged where there are many (see `walk`): the
    first, the last and the `likely` one. The best of them is joined by its neighbours, one after
    the other, as far as the effort goes; the effort that is left goes into merging less. A span is
    that of one rank, whatever the others do.

    The `likely` rank limits the others most, by other bounds. The effort is about how many states
    to visit.
    """
    ranks, spent = sorted({*placement}), 0  # those that have a stage
    beside = {rank: {ranks[at - 1], ranks[at + 1 - len(ranks)]} for at, rank in enumerate(ranks)}

    def bound(chosen: tuple[int, ...], width: int, budget: int) -> tuple[float, bool]:
        nonlocal spent
        pipe = cut_subpipeline(costs, placement, memory, chosen)
        if span:
            pipe = replace(pipe, release=0.0, tail=0.0)
        weight = max(1.0, len(pipe.stages) / 3)  # a state of many stages takes longer
        diagram = walk(pipe, microbatches, width, round(budget / weight))
        spent += round(diagram.states * weight)
        return diagram.bound, diagram.exact

    single: dict[tuple[int, ...], tuple[float, bool]] = {
        (rank,): bound((rank,), _WIDTH, effort // 4)
        for rank in sorted({likely, ranks[0], ranks[-1]})
    }
    chosen: tuple[int, ...] = max(single, key=lambda ranks: single[ranks][0])
    (best, exact), width = single[chosen], _WIDTH
    while best and not span and len(chosen) < len(ranks):
        larger = {
            tuple(sorted({*chosen, other})) for rank in chosen for other in beside[rank] - {*chosen}
        }
        bounds = {ranks: bound(ranks, _WIDTH, effort - spent) for ranks in sorted(larger)}
        joined = max(bounds, key=lambda ranks: bounds[ranks][0])
        value, whole = bounds[joined]
        if not value:
            break
        chosen, exact, best = joined, whole, max(best, value)
    while best and not exact and spent < effort:
        width *= 4
        value, exact = bound(chosen, width, effort - spent)
        if not value:
            break
        best = max(best, value)
    return best


class Diagram(NamedTuple):
    """The result of a walk through the states of a subpipeline.

    Attributes:
        bound: no schedule of it, and so none of the pipeline, ends earlier; 0 if given up.
        states: how many were visited.
        exact: no states were merged, so a schedule of the subpipeline does end then.
    """

    bound: float
    states: int
    exact: bool


def walk(pipe: Subpipeline, microbatches: int, width: int, budget: int) -> Diagram:
    """The least time in which a subpipeline can run, or less, by visiting its states.

    Microbatches are alike, so only schedules matter in which every stage takes them in order (the
    k-th F of a stage needs k F's of the stage before, whichever they are; memory depends on counts
    alone). The states after n actions make a layer. Of two states with the same counts, one that is
    later in every respect is dropped; and where more than `width` are left, neighbours are merged
    into one that is as early as either in every respect, which can do whatever they can: a relaxed
    decision diagram (Andersen, Hadzic, Hooker and Tiedemann, CP 2007).

    It gives up once more states than `budget` are likely to be visited.
    """
    counts, state = initial_state(pipe)
    sums, ranks = prefix_sums((1.0,) * microbatches), len(pipe.memory)
    # By how many F, I and W are done: a B is two of them.
    layers: list[dict[Counts, set[State]]] = [
        {} for _ in range(3 * len(pipe.stages) * microbatches + 1)
    ]
    layers[0][counts] = {state}
    visited, exact = 0, True
    for turn in range(len(layers) - 1):
        kept: dict[Counts, list[State]] = {}
        for counts, reached in layers[turn].items():
            if not reached:
                continue  # no state of the layers before takes the step to these counts
            states = undominated(reached)
            if len(states) > width:
                states, exact = _merged(states, width), False
            kept[counts] = states
        layers[turn] = {}
        size = sum(map(len, kept.values()))
        if visited + size * (len(layers) - 1 - turn) > 2 * budget or visited > budget:
            return Diagram(0.0, visited, False)
        visited += size
        for counts, states in kept.items():
            steps = possible_steps(pipe, counts, sums, sums)
            targets = [
                layers[turn + 1 + (step.kind == WHOLE)].setdefault(step.counts, set())
                for step in steps
            ]
            for state in states:
                for nth, following in successors(ranks, state, steps):
                    targets[nth].add(following)
    ends = [max(state[: ranks + 1]) for states in layers[-1].values() for state in states]
    return Diagram(pipe.release + min(ends), visited, exact)


def undominated(states: Collection[State]) -> list[State]:
    """The states of which no other is earlier in every respect, from early to late."""
    if len(states) == 1:
        return list(states)
    kept: list[State] = []
    for _, state in sorted((sum(state), state) for state in states):
        if not any(all(map(le, other, state)) for other in kept):
            kept.append(state)
    return kept


def _merged(states: list[State], width: int) -> list[State]:
    """At most `width` states: runs of neighbours, each merged into one."""
    size = len(states)
    groups = [states[at * size // width : (at + 1) * size // width] for at in range(width)]
    return undominated(
        {group[0] if len(group) == 1 else tuple(map(min, *group)) for group in groups}
    )
