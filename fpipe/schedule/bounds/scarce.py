"""Which ranks to look at together where memory is scarce, and how closely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fpipe.schedule.bounds.diagram import walk
from fpipe.schedule.bounds.part import part_of
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
