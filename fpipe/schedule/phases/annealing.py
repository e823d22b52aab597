"""Simulated annealing on orders: move actions of the critical path."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Final

from fpipe.schedule.bounds.states import FORWARD, GRADIENT, WEIGHT
from fpipe.schedule.orders.evaluator import Evaluator, Tables
from fpipe.schedule.orders.list_scheduler import list_schedule
from fpipe.schedule.orders.problem import Candidate, Order, rename_microbatches
from fpipe.schedule.phases.breeding import random_policy
from fpipe.schedule.phases.portfolio import Incumbents, Phase, Step

_MOVES: Final = 2_000  # of each of the first cycles
_SLOWER: Final = 4  # after so many cycles they are longer by as much
_BATCH: Final = 50  # moves of a step
_COST: Final = 0.015  # of a move, in iterations
_HEATS: Final = (0.5, 1.0, 2.0)  # by how much an order may get worse at first, in mean times
_COLD: Final = 0.05  # the share of the heat that is left in the end


def annealings(
    evaluators: Mapping[tuple[int, ...], Evaluator], incumbents: Incumbents, random: Random
) -> Phase:
    """Cycle after cycle of annealing: from the best order, from other good ones, from new ones."""
    nth = 0
    while True:
        open_to = [
            each
            for each in incumbents.candidates
            if each.problem.placement in evaluators and not incumbents.hopeless(each.problem)
        ]
        if not open_to:
            yield Step(0.0)
            continue
        problem, order = open_to[0]
        if nth % 4 == 1:
            problem, order = open_to[min(int(random.expovariate(0.3)), len(open_to) - 1)]
        elif nth % 4 == 3:
            played = list_schedule(problem, random_policy(random, problem))
            order = played or order
            yield Step(1.0)
        evaluator = evaluators[problem.placement]
        heat = random.choice(_HEATS) * math.sqrt(min(1.0, 150 / problem.actions))
        moves = _MOVES * (1 + nth // _SLOWER)
        yield from anneal(evaluator, order, random, moves, heat)
        nth += 1


def anneal(evaluator: Tables, order: Order, random: Random, moves: int, heat: float = 0.0) -> Phase:
    """Improve an order by moves of actions of its critical path; yield each better one.

    The heat says how much worse an order may get at first, in mean times of an action.
    """
    problem = evaluator.problem
    value, ends = evaluator.times(order.rows, order.fused)
    best = current = replace(order, value=value)
    path = evaluator.critical(current, ends)
    warmth = heat * problem.mean_time
    cooling = _COLD ** (1 / moves)
    cost = _COST * problem.scale
    for nth in range(1, moves + 1):
        warmth *= cooling
        move = moved(evaluator, current, random.choice(path), random)
        # The draw comes first, so that the evaluation can stop once it is sure to be refused.
        allowed = current.value - warmth * math.log(1 - random.random()) + problem.slack
        if move is not None:
            limit = math.inf if problem.objective == "span" else allowed
            value, ends = evaluator.times(move.rows, move.fused, limit)
            if value <= allowed:
                current = replace(move, value=value)
                path = evaluator.critical(current, ends)
                if value < best.value * (1 - 1e-12):
                    best = current
                    yield Step(0.0, Candidate(problem, best))
        if nth % _BATCH == 0:
            yield Step(cost * _BATCH)


_STEPS: Final = (1, 1, 1, 1, 2, 2, 3, 4, 6, 8, 12)
_HELPERS: Final = 2  # other actions that may move along
_EXCHANGED: Final = 0.1  # of moves, where microbatches differ in size
_FUSED: Final = 0.2  # of moves of backwards, where a B is not what its halves are


def moved(evaluator: Tables, order: Order, action: int, random: Random) -> Order | None:
    """Move `action` in its row, for an order of no value yet; None where that is not allowed.

    The action moves some places to the left or right in its row, never past one that it depends on.
    Where memory forbids that, others move along: weight gradients that make room for a forward, or
    forwards for which a backward that now comes later made room. The move may leave an action on
    another rank without input; the evaluation then rejects the order. Where a full
    backward does not cost what its halves cost, a move may also fuse or split one. Where
    microbatches differ in size, two may change places.
    """
    problem = evaluator.problem
    stage, kind, microbatch = problem.parts(action)
    if problem.uneven and random.random() < _EXCHANGED:
        return _exchanged(evaluator, order, microbatch, random)
    rank = problem.placement[stage]
    row, fused = order.rows[rank], order.fused
    if problem.fuses and kind != FORWARD and random.random() < _FUSED:
        gradient = action - (kind - GRADIENT) * problem.microbatches
        changed, fused = _fused_or_split(row, gradient, problem.microbatches, fused, random)
    else:
        at = row.index(action)
        step = random.choice(_STEPS)
        to = min(len(row) - 1, at + step) if random.random() < 0.5 else max(0, at - step)
        passed = row[at + 1 : to + 1] if to > at else row[to:at]
        base = action - kind * problem.microbatches
        same = (base, base + problem.microbatches, base + 2 * problem.microbatches)
        if to == at or any(other in passed for other in same):
            return None
        changed = row.copy()
        changed.insert(to, changed.pop(at))
        if not evaluator.fits(rank, changed, fused):
            if kind == FORWARD and to < at:
                return _with_room(evaluator, order, rank, changed, to)
            if kind != FORWARD and to > at:
                return _with_less(evaluator, order, rank, changed, to, passed)
            return None
    if not evaluator.fits(rank, changed, fused):
        return None
    return _with_row(order, rank, changed, fused)


def _with_row(order: Order, rank: int, row: list[int], fused: frozenset[int]) -> Order:
    rows = order.rows.copy()
    rows[rank] = row
    return Order(math.inf, rows, fused)


def _with_room(evaluator: Tables, order: Order, rank: int, row: list[int], at: int) -> Order | None:
    """Move weight gradients that can make room for the forward at `at` before it."""
    count = evaluator.problem.microbatches
    done = set(row[:at])
    late = (w for w in row[at + 1 :] if w // count % 3 == WEIGHT and w - count in done)
    for weight, _ in zip(list(late), range(_HELPERS), strict=False):
        row.remove(weight)
        row.insert(at, weight)
        at += 1
        if evaluator.fits(rank, row, order.fused):
            return _with_row(order, rank, row, order.fused)
    return None


def _with_less(
    evaluator: Tables, order: Order, rank: int, row: list[int], at: int, passed: Sequence[int]
) -> Order | None:
    """Move forwards that the backward at `at` has passed behind it again."""
    count = evaluator.problem.microbatches
    forwards = [action for action in passed if action // count % 3 == FORWARD]
    for forward in forwards[: -1 - _HELPERS : -1]:
        row.remove(forward)
        row.insert(at, forward)
        at -= 1
        if evaluator.fits(rank, row, order.fused):
            return _with_row(order, rank, row, order.fused)
    return None


def _exchanged(evaluator: Tables, order: Order, microbatch: int, random: Random) -> Order | None:
    """Exchange a microbatch with one of another size."""
    problem = evaluator.problem
    other = random.randrange(problem.microbatches)
    if all(row[other] == row[microbatch] for row in (problem.sizes, problem.amounts)):
        return None
    changed = rename_microbatches(problem, order, {microbatch: other, other: microbatch})
    return changed if evaluator.fits_all(changed) else None


def _fused_or_split(
    row: list[int], gradient: int, count: int, fused: frozenset[int], random: Random
) -> tuple[list[int], frozenset[int]]:
    """Split a B and move its W to a later place, or fuse an I and its W at the place of either."""
    row, weight = row.copy(), gradient + count
    if gradient in fused:
        at = row.index(gradient) + 1 + int(random.expovariate(0.5))
        row.insert(min(at, len(row)), weight)
        return row, fused - {gradient}
    if random.random() < 0.3:
        row.remove(gradient)
        row[row.index(weight)] = gradient
    else:
        row.remove(weight)
    return row, fused | {gradient}
