"""Beam search over the states of all ranks: the most promising ones, or all of them if few."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
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
    initial_state,
    possible_steps,
    prefix_sums,
    successors,
    work_left,
)
from fpipe.schedule.bounds.subpipeline import Subpipeline, cut_subpipeline
from fpipe.schedule.orders.evaluator import Evaluator
from fpipe.schedule.orders.problem import Candidate, Order, Problem, by_size
from fpipe.schedule.phases.portfolio import Incumbents, Phase, Step

_WIDTHS: Final = (4, 16, 64, 256, 1024, 4096, 16_384)
_TURNS: Final = 32  # orders of unequal microbatches that the narrowest beam tries
_COST: Final = 0.01, 0.004  # of a state, and of each of its stages, in iterations
# A beam ranks states by when each rank would be done if it never waited again, plus a weight for
# each W and each I that is done, in mean times of an action: a state that keeps its W's for later
# can fill waits, and one with more I's has less to wait for.
_GUIDES: Final = ((0.0, 0.0), (0.6, 0.0), (0.0, -0.4))

Trail: TypeAlias = tuple["Trail", int, int] | None  # kinds and stages up to here, last first


class _Scored(NamedTuple):
    """A state and its score."""

    score: float
    last: float
    state: State
    counts: Counts
    trail: Trail


def beams(evaluator: Evaluator, incumbents: Incumbents, random: Random) -> Phase:
    """Beams of growing width.

    A beam visits the states of all ranks as the bound does (see `bounds.decision_diagram`). If
    there are too many, it does not merge them, but keeps those in which the ranks will be done
    soonest. A beam that drops no state finds the best schedule of all.

    Where microbatches differ in size, a beam takes them in one order on all stages; the wider the
    beams, the fewer orders they try. Where a full backward differs from I and W, some beams take
    full backwards alone.
    """
    problem = evaluator.problem
    pipes, cost = _subpipelines(problem), _COST[0] + _COST[1] * len(problem.placement)
    turns = _turns(problem, random)
    # A beam with the first guide comes before narrower ones with others.
    pairs = [(at, other) for at in range(len(_WIDTHS)) for other in range(len(_GUIDES))]
    for at, other in sorted(pairs, key=lambda pair: (sum(pair), pair[1])):
        values: dict[tuple[int, ...], float] = {}
        for pipe, turn in product(pipes, turns[: max(1, len(turns) >> at)]):
            width, guide = _WIDTHS[at], _GUIDES[other]
            for visited, order in _walk(problem, pipe, turn, width, guide, incumbents):
                if order is None:
                    yield Step(cost * visited)
                    continue
                value, _ = evaluator.times(order.rows, order.fused)
                values[turn] = min(value, values.get(turn, value))
                yield Step(1.0, Candidate(problem, replace(order, value=value)))
            if incumbents.hopeless(problem):
                return
        turns.sort(key=lambda turn: values.get(turn, float("inf")))


def _subpipelines(problem: Problem) -> list[Subpipeline]:
    """All ranks, for each choice of backwards that is worth a beam."""
    choices: list[tuple[int, ...] | None] = [None]
    if problem.fuses and not problem.uneven:
        choices.append((WHOLE,))
    elif problem.fuses:
        # W's of unequal microbatches and B's do not go together: counts do not tell what is left.
        choices = [(WHOLE,)] if problem.grows else [(GRADIENT,), (WHOLE,)]
    ranks = range(problem.ranks)
    return [
        cut_subpipeline(problem.costs, problem.placement, problem.memory, ranks, kinds=kinds)
        for kinds in choices
    ]


def _turns(problem: Problem, random: Random) -> list[tuple[int, ...]]:
    """Orders of the microbatches: one where they are alike, else by size, and some at random."""
    turns = {problem.turn: None}
    if problem.uneven:
        turns |= dict.fromkeys(map(tuple, by_size(problem.sizes, problem.turn)))
        both = list(zip(problem.sizes, problem.amounts, strict=True))
        seen = {tuple(both[k] for k in turn) for turn in turns}
        for _ in range(4 * _TURNS):
            turn = tuple(random.sample(problem.turn, problem.microbatches))
            sizes = tuple(both[k] for k in turn)
            if sizes not in seen and len(turns) < _TURNS:
                seen.add(sizes)
                turns[turn] = None
    return list(turns)


def _walk(
    problem: Problem,
    pipe: Subpipeline,
    turn: Sequence[int],
    width: int,
    guide: tuple[float, float],
    incumbents: Incumbents,
) -> Iterator[tuple[int, Order | None]]:
    """One beam, layer by layer: yields the number of states visited, and the best order at the end.

    A beam that drops no state raises the bound to the value of its order.
    """
    counts, state = initial_state(pipe)
    sums, ranks = prefix_sums([problem.sizes[k] for k in turn]), len(pipe.memory)
    amounts = prefix_sums([problem.amounts[k] for k in turn])
    weights = [each * problem.mean_time for each in guide]
    # By how many F, I and W are done: a B is two of them.
    layers: list[dict[Counts, dict[State, Trail]]] = [
        {} for _ in range(3 * len(pipe.stages) * len(turn) + 2)
    ]
    layers[0][counts] = {state: None}
    complete = True
    for nth in range(len(layers) - 2):
        limit = float("inf") if problem.objective == "span" else incumbents.value * (1 - 1e-12)
        scored: list[_Scored] = []
        for counts, reached in layers[nth].items():
            if not reached:
                continue
            left = work_left(pipe, counts, sums)
            bonus = weights[0] * sum(counts[2]) + weights[1] * sum(counts[1])
            for state in undominated(reached):
                done = [clock + rest for clock, rest in zip(state[1:], left, strict=False)]
                last = max(*done, state[0])
                if last < limit:
                    score = sum(done) + bonus
                    scored.append(_Scored(score, last, state, counts, reached[state]))
        layers[nth] = {}
        if len(scored) > width:
            complete = False
            scored = nsmallest(width, scored)
        kept: dict[Counts, list[_Scored]] = {}
        for one in scored:
            kept.setdefault(one.counts, []).append(one)
        for counts, ones in kept.items():
            steps = possible_steps(pipe, counts, sums, amounts)
            targets = [
                layers[nth + 1 + (step.kind == WHOLE)].setdefault(step.counts, {}) for step in steps
            ]
            for one in ones:
                for at, following in successors(ranks, one.state, steps):
                    step = steps[at]
                    targets[at].setdefault(following, (one.trail, step.kind, step.at))
        yield len(scored), None
    ends = [
        (max(state[: ranks + 1]), trail)
        for states in layers[-2].values()
        for state, trail in states.items()
    ]
    exact = problem.objective == "makespan" and problem.costs.pair is None
    if complete and pipe.complete and not problem.uneven and exact:
        incumbents.raise_bound(problem, min([incumbents.value, *(end for end, _ in ends)]))
    if ends:
        yield 0, _order(problem, turn, min(ends, key=lambda end: end[0])[1])


def _order(problem: Problem, turn: Sequence[int], trail: Trail) -> Order:
    """The order of the actions of a trail."""
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
