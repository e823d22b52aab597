"""Beam search: all ways to go on, as far as they promise most. Where memory is scarce, all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import nsmallest
from itertools import product
from random import Random
from typing import Final, NamedTuple, TypeAlias

from fpipe.schedule.bounds.decision_diagram import undominated
from fpipe.schedule.bounds.states import (
    FORWARD,
    GRADIENT,
    WEIGHT,
    WHOLE,
    Counts,
    State,
    after,
    beginning,
    possible,
    sums_of,
    work_left,
)
from fpipe.schedule.bounds.subpipeline import Part, part_of
from fpipe.schedule.searching.evaluator import Evaluator
from fpipe.schedule.searching.portfolio import Phase, Standing, Step
from fpipe.schedule.searching.problem import Candidate, Order, Problem, by_size

_WIDTHS: Final = (4, 16, 64, 256, 1024, 4096, 16_384)
_TURNS: Final = 32  # orders of unequal microbatches that the narrowest beam tries
_COST: Final = 0.01, 0.004  # of a state, and of each of its stages, in iterations
# What a beam goes by is when each rank would be done, were there no more waiting, and how much a W
# that is done, and an I, are worth beside it, in parts of the mean time of an action: a state that
# has kept its W's for later can fill waits, and one with more I's has less to wait for.
_GUIDES: Final = ((0.0, 0.0), (0.6, 0.0), (0.0, -0.4))

Trail: TypeAlias = tuple["Trail", int, int] | None  # kinds and stages up to here, last first


class _Scored(NamedTuple):
    """A state by what it promises."""

    score: float
    last: float
    state: State
    counts: Counts
    trail: Trail


def beams(evaluator: Evaluator, standing: Standing, random: Random) -> Phase:
    """Beams of growing width.

    A beam goes through the states of all ranks as the bound does (see `bounds.diagram`), but where
    that merges what is too much, this keeps the states in which the ranks will be done soonest, if
    none waits any more. A beam that nothing falls out of has found the best schedule of all.

    Where microbatches differ in size, each beam takes them in one turn on all stages; the wider the
    beams, the fewer the turns that they try. Where a full backward is not what its halves are,
    there are beams of full backwards alone.

    Args:
        evaluator: of what is to be scheduled.
        standing: where to look up what is known already.
        random: for the turns that are tried.
    """
    problem = evaluator.problem
    parts, cost = _parts(problem), _COST[0] + _COST[1] * len(problem.placement)
    turns = _turns(problem, random)
    # A beam with the first guide comes before narrower ones with others.
    pairs = [(at, other) for at in range(len(_WIDTHS)) for other in range(len(_GUIDES))]
    for at, other in sorted(pairs, key=lambda pair: (sum(pair), pair[1])):
        values: dict[tuple[int, ...], float] = {}
        for part, turn in product(parts, turns[: max(1, len(turns) >> at)]):
            for looked, found in _walk(problem, part, turn, _WIDTHS[at], _GUIDES[other], standing):
                if found is None:
                    yield Step(cost * looked)
                    continue
                value, _ = evaluator.times(found.rows, found.fused)
                values[turn] = min(value, values.get(turn, value))
                yield Step(1.0, Candidate(problem, Order(value, found.rows, found.fused)))
            if standing.hopeless(problem):
                return
        turns.sort(key=lambda turn: values.get(turn, float("inf")))


def _parts(problem: Problem) -> list[Part]:
    """All ranks, with the ways to take backwards that are worth beams of their own."""
    ways: list[tuple[int, ...] | None] = [None]
    if problem.fuses and not problem.uneven:
        ways.append((WHOLE,))
    elif problem.fuses:
        # W's of unequal microbatches and B's do not go together: counts do not tell what is left.
        ways = [(WHOLE,)] if problem.grows else [(GRADIENT,), (WHOLE,)]
    ranks = range(problem.ranks)
    return [
        part_of(problem.costs, problem.placement, problem.memory, ranks, kinds=kinds)
        for kinds in ways
    ]


def _turns(problem: Problem, random: Random) -> list[tuple[int, ...]]:
    """Ways to order the microbatches: one where they are alike, else by size, and some others."""
    turns = {problem.turn: None}
    if problem.uneven:
        turns |= dict.fromkeys(map(tuple, by_size(problem.sizes, problem.turn)))
        seen = {tuple(problem.sizes[k] for k in turn) for turn in turns}
        for _ in range(4 * _TURNS):
            turn = tuple(random.sample(problem.turn, problem.microbatches))
            sizes = tuple(problem.sizes[k] for k in turn)
            if sizes not in seen and len(turns) < _TURNS:
                seen.add(sizes)
                turns[turn] = None
    return list(turns)


def _walk(
    problem: Problem,
    part: Part,
    turn: Sequence[int],
    width: int,
    guide: tuple[float, float],
    standing: Standing,
) -> Iterator[tuple[int, Order | None]]:
    """One beam, layer by layer: how many states it looked at, and what it found in the end.

    A beam from which nothing has fallen tells the standing that there is nothing better.
    """
    counts, state = beginning(part)
    sums, ranks = sums_of([problem.sizes[k] for k in turn]), len(part.memory)
    weights = [each * problem.mean_time for each in guide]
    # By how many F, I and W are done: a B is two of them.
    layers: list[dict[Counts, dict[State, Trail]]] = [
        {} for _ in range(3 * len(part.stages) * len(turn) + 2)
    ]
    layers[0][counts] = {state: None}
    whole = True
    for nth in range(len(layers) - 2):
        limit = float("inf") if problem.objective == "span" else standing.value * (1 - 1e-12)
        scored: list[_Scored] = []
        for counts, reached in layers[nth].items():
            left = work_left(part, counts, sums)
            bonus = weights[0] * sum(counts[2]) + weights[1] * sum(counts[1])
            for state in undominated(reached):
                done = [clock + rest for clock, rest in zip(state[1:], left, strict=False)]
                last = max(*done, state[0])
                if last < limit:
                    score = sum(done) + bonus
                    scored.append(_Scored(score, last, state, counts, reached[state]))
        layers[nth] = {}
        if len(scored) > width:
            whole = False
            scored = nsmallest(width, scored)
        kept: dict[Counts, list[_Scored]] = {}
        for one in scored:
            kept.setdefault(one.counts, []).append(one)
        for counts, ones in kept.items():
            steps = possible(part, counts, sums)
            targets = [
                layers[nth + 1 + (step.kind == WHOLE)].setdefault(step.counts, {}) for step in steps
            ]
            for one in ones:
                for at, following in after(ranks, one.state, steps):
                    step = steps[at]
                    targets[at].setdefault(following, (one.trail, step.kind, step.at))
        yield len(scored), None
    ends = [
        (max(state[: ranks + 1]), trail)
        for states in layers[-2].values()
        for state, trail in states.items()
    ]
    if whole and part.free and not problem.uneven and problem.objective == "makespan":
        standing.raise_bound(problem, min([standing.value, *(end for end, _ in ends)]))
    if ends:
        yield 0, _order(problem, turn, min(ends, key=lambda end: end[0])[1])


def _order(problem: Problem, turn: Sequence[int], trail: Trail) -> Order:
    """The actions of a trail as the search numbers them."""
    steps: list[tuple[int, int]] = []
    while trail is not None:
        trail, kind, at = trail
        steps.append((kind, at))
    rows: list[list[int]] = [[] for _ in range(problem.ranks)]
    count = problem.microbatches
    done = [[0] * len(problem.placement) for _ in range(2)]
    owed: list[list[int]] = [[] for _ in problem.placement]  # microbatches that lack their W
    fused = set()
    for kind, at in reversed(steps):
        if kind == WEIGHT:
            microbatch = owed[at].pop(0)
        else:
            row = done[kind != FORWARD]
            microbatch = turn[row[at]]
            row[at] += 1
        number = (at * 3 + (GRADIENT if kind == WHOLE else kind)) * count + microbatch
        if kind == GRADIENT:
            owed[at].append(microbatch)
        elif kind == WHOLE:
            fused.add(number)
        rows[problem.placement[at]].append(number)
    return Order(float("inf"), rows, frozenset(fused))
