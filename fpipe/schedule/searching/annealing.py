"""Simulated annealing on orders: move actions that the makespan waits for."""

from __future__ import annotations

import math
from random import Random

from fpipe.schedule.searching.arranging import renamed
from fpipe.schedule.searching.budget import Budget
from fpipe.schedule.searching.evaluator import Evaluator
from fpipe.schedule.searching.problem import FORWARD, GRADIENT, WEIGHT, Order

_STEPS = (1, 1, 1, 2, 2, 3, 4, 6, 8)
_HEAT = 0.001  # of the value: how much worse an order may get, early on


def anneal(evaluator: Evaluator, order: Order, random: Random, budget: Budget) -> Order:
    """Improve an order until the budget is spent or the bound is met.

    A move takes an action of the critical path some places to the left or right in its row, never
    past an action that it depends on, and never beyond the memory. Any action on another rank that
    it would leave without input makes the order impossible, which its evaluation finds. Where a
    full backward does not cost what its halves cost, a move may also fuse or split one. Where
    microbatches differ in size, two may change places.

    Returns:
        The best order met, `order` itself if none was better.
    """
    problem = evaluator.problem
    value, ends = evaluator.times(order.rows, order.fused)
    best = current = Order(value, order.rows, order.fused)
    path = evaluator.critical(current, ends)
    begun = budget.progress
    while not budget.over and not problem.solved(best.value):
        moved = _move(evaluator, current, random.choice(path), random)
        if moved is None:
            budget.spend(0.02)
            continue
        rows, fused = moved
        rest = (budget.share - budget.progress) / max(1e-9, budget.share - begun)
        # The draw comes first, so that the evaluation can stop once it is sure to be refused.
        allowed = current.value - _HEAT * order.value * rest * math.log(1 - random.random())
        limit = float("inf") if problem.objective == "span" else allowed + problem.slack
        value, ends = evaluator.times(rows, fused, limit)
        budget.spend()
        if value > allowed + problem.slack:
            continue
        current = Order(value, rows, fused)
        path = evaluator.critical(current, ends)
        if value < best.value * (1 - 1e-12):
            best = current
    return best


def _move(
    evaluator: Evaluator, order: Order, action: int, random: Random
) -> tuple[list[list[int]], frozenset[int]] | None:
    """The rows after one move of `action`, or None where the move is not allowed."""
    problem = evaluator.problem
    stage, kind, microbatch = problem.parts(action)
    rank = problem.placement[stage]
    row, fused = order.rows[rank], order.fused
    if problem.uneven and random.random() < 0.2:
        return _exchange(evaluator, order, microbatch, random)
    if problem.fuses and kind != FORWARD and random.random() < 0.2:
        return _fused_or_split(evaluator, order, action)
    at = row.index(action)
    step = random.choice(_STEPS)
    to = min(len(row) - 1, at + step) if random.random() < 0.5 else max(0, at - step)
    if to == at:
        return None
    count = problem.microbatches
    base = action - kind * count
    family = (base, base + GRADIENT * count, base + WEIGHT * count)
    passed = row[at + 1 : to + 1] if to > at else row[to:at]
    if any(other in passed for other in family):
        return None
    changed = row.copy()
    changed.insert(to, changed.pop(at))
    if not evaluator.fits(rank, changed, fused):
        return None
    rows = order.rows.copy()
    rows[rank] = changed
    return rows, fused


def _exchange(
    evaluator: Evaluator, order: Order, microbatch: int, random: Random
) -> tuple[list[list[int]], frozenset[int]] | None:
    """The rows after a microbatch has changed places with one of another size."""
    problem = evaluator.problem
    other = random.randrange(problem.microbatches)
    if problem.sizes[other] == problem.sizes[microbatch]:
        return None
    moved = renamed(problem, order, {microbatch: other, other: microbatch})
    return (moved.rows, moved.fused) if evaluator.fits_all(moved) else None


def _fused_or_split(
    evaluator: Evaluator, order: Order, action: int
) -> tuple[list[list[int]], frozenset[int]] | None:
    """The rows after an I and its W are fused into a B, or the B is split, at the place of I."""
    problem = evaluator.problem
    count = problem.microbatches
    stage, kind, _ = problem.parts(action)
    rank = problem.placement[stage]
    gradient = action - (kind - GRADIENT) * count
    weight = gradient + count
    row = order.rows[rank].copy()
    if gradient in order.fused:
        row.insert(row.index(gradient) + 1, weight)
        fused = order.fused - {gradient}
    else:
        row.remove(weight)
        fused = order.fused | {gradient}
    if not evaluator.fits(rank, row, fused):
        return None
    rows = order.rows.copy()
    rows[rank] = row
    return rows, fused
