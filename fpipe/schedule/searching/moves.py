"""Moves: small changes of an order, each of which keeps to the memory."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final, NamedTuple

from fpipe.schedule.bounds.steps import FORWARD, GRADIENT, WEIGHT
from fpipe.schedule.searching.arranging import renamed
from fpipe.schedule.searching.evaluator import Evaluator
from fpipe.schedule.searching.problem import Order

_STEPS: Final = (1, 1, 1, 1, 2, 2, 3, 4, 6, 8, 12)
_HELPERS: Final = 2  # other actions that may move along
_EXCHANGED: Final = 0.1  # of moves, where microbatches differ in size
_FUSED: Final = 0.2  # of moves of backwards, where a B is not what its halves are


class Move(NamedTuple):
    """What an order becomes."""

    rows: list[list[int]]
    fused: frozenset[int]


def moved(evaluator: Evaluator, order: Order, action: int, random: Random) -> Move | None:
    """An order after one move of `action`, or None where that is not allowed.

    The action moves some places to the left or right in its row, never past one that it depends on.
    Where memory forbids that, others move along: weight gradients that make room for a forward, or
    forwards for which a backward that now comes later has made room. An action on another rank that
    is left without input makes the order impossible, which its evaluation finds. Where a full
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
        own = (base, base + problem.microbatches, base + 2 * problem.microbatches)
        if to == at or any(other in passed for other in own):
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


def _with_row(order: Order, rank: int, row: list[int], fused: frozenset[int]) -> Move:
    rows = order.rows.copy()
    rows[rank] = row
    return Move(rows, fused)


def _with_room(
    evaluator: Evaluator, order: Order, rank: int, row: list[int], at: int
) -> Move | None:
    """After weight gradients that can make room for the forward at `at` have moved before it."""
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
    evaluator: Evaluator, order: Order, rank: int, row: list[int], at: int, passed: Sequence[int]
) -> Move | None:
    """After forwards that stood behind the backward at `at` have moved behind it again."""
    count = evaluator.problem.microbatches
    forwards = [action for action in passed if action // count % 3 == FORWARD]
    for forward in forwards[: -1 - _HELPERS : -1]:
        row.remove(forward)
        row.insert(at, forward)
        at -= 1
        if evaluator.fits(rank, row, order.fused):
            return _with_row(order, rank, row, order.fused)
    return None


def _exchanged(evaluator: Evaluator, order: Order, microbatch: int, random: Random) -> Move | None:
    """After a microbatch has changed places with one of another size."""
    problem = evaluator.problem
    other = random.randrange(problem.microbatches)
    if problem.sizes[other] == problem.sizes[microbatch]:
        return None
    found = renamed(problem, order, {microbatch: other, other: microbatch})
    return Move(found.rows, found.fused) if evaluator.fits_all(found) else None


def _fused_or_split(
    row: list[int], gradient: int, count: int, fused: frozenset[int], random: Random
) -> tuple[list[int], frozenset[int]]:
    """After a B is split and its W has moved to a later place, or an I and its W are fused, at the
    place of either."""
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
