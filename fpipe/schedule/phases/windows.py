"""Windows: free some actions of a few ranks that run at about the same time, and order them anew.

All other actions keep their order. What comes in from them gives each free action a time before
which it cannot start (its head), and what goes out to them a time that passes between its end and
the end of the step (its tail). So a window is a small job shop with heads and tails, which branch
and bound solves: of the actions that compete for the rank of the one that could end first, each
goes first in turn (Giffler and Thompson, Operations Research 8, 1960). A window is worth a look
where the longest path runs through it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from fpipe.schedule.orders.evaluator import Evaluator
from fpipe.schedule.orders.problem import Candidate, Order
from fpipe.schedule.phases.portfolio import Phase, Step

_SHAPES: Final = ((1, 9), (2, 7), (3, 5), (4, 7))  # ranks, and actions of each
_NODES: Final = 400  # of a search tree, after which the best order so far is taken
_COST: Final = 0.002  # of a node, in iterations
_CHECK: Final = 0.3  # of an order and its tails
_PATIENCE: Final = 3  # sweeps without a shorter step
_NONE: Final[frozenset[int]] = frozenset()


def reorder_windows(evaluator: Evaluator, order: Order) -> Phase:
    """Improve an order window by window along its longest path, until that brings nothing.

    Only for the makespan: a span has no end that all tails lead to. And only where its tables tell
    all that an action waits for.
    """
    fused, problem = order.fused, evaluator.problem
    if problem.objective != "makespan" or problem.costs.entangled:
        return
    tables = evaluator.with_fused(fused)
    plan, fruitless = Plan(tables, order.rows), 0
    best = plan.value
    while fruitless < _PATIENCE and not problem.solved(best):
        fruitless += 1
        for count, size in _SHAPES:
            path = tables.critical(Order(plan.value, plan.rows, _NONE), plan.ends)
            for action in path[:: size // 2]:
                for ranks in _neighbours(
                    problem.placement[action // (3 * problem.microbatches)], problem.ranks, count
                ):
                    window = Window(plan, _around(plan, action, ranks, size))
                    rows = window.solve()
                    yield Step(_COST * window.nodes)
                    if rows is None:
                        continue
                    changed = Plan(tables, rows)
                    if changed.value <= plan.value + problem.slack:
                        plan = changed
                    yield Step(_CHECK * problem.actions / 2_000)
        # Not each small step: others would begin with every one of them.
        if plan.value < best * (1 - 1e-12):
            best, fruitless = plan.value, 0
            yield Step(0.0, Candidate(problem, Order(best, plan.rows, fused)))


class Plan:
    """An order with its times.

    Attributes:
        tables: of the actions.
        rows: the order.
        value: its makespan; infinite if it cannot run, and then there is nothing else.
        ends: of each action.
        tails: from the end of each action to the end of the step.
        places: of each action in its row.
        readers: the actions that read the output of each.
    """

    def __init__(self, tables: Evaluator, rows: list[list[int]]) -> None:
        self.tables, self.rows = tables, rows
        self.value, self.ends = tables.times(rows, _NONE)
        if self.value == math.inf:
            return
        duration, source, delay, ends = tables.duration, tables.source, tables.delay, self.ends
        tails, places = [0.0] * len(ends), [0] * len(ends)
        self.readers: list[list[int]] = [[] for _ in ends]
        before = [-1] * len(ends)
        for row in rows:
            for at, action in enumerate(row):
                places[action] = at
            for first, second in pairwise(row):
                before[second] = first
        if tables.work is not None:
            for stage, rank in enumerate(tables.problem.placement):
                last = next(a for a in reversed(rows[rank]) if tables.problem.parts(a)[0] == stage)
                tails[last] = tables.work.least_tail(stage)
        actions = [action for row in rows for action in row]
        for action in sorted(actions, key=lambda each: (ends[each], places[each]), reverse=True):
            rest = duration[action] + tails[action]
            if (earlier := before[action]) >= 0 and tails[earlier] < rest:
                tails[earlier] = rest
            if (read := source[action]) >= 0:
                self.readers[read].append(action)
                tails[read] = max(tails[read], rest + delay[action])
        self.tails, self.places = tails, places


def _neighbours(rank: int, ranks: int, count: int) -> Iterator[range]:
    """The runs of so many ranks around one."""
    for first in range(max(0, rank - count + 1), min(rank, ranks - count) + 1):
        yield range(first, first + count)


def _around(plan: Plan, action: int, ranks: Sequence[int], size: int) -> dict[int, range]:
    """Per rank, the places of its actions that run at about the time of `action`."""
    spans = {}
    for rank in ranks:
        row = plan.rows[rank]
        at = bisect_left(row, plan.ends[action], key=plan.ends.__getitem__)
        first = max(0, min(at - size // 2, len(row) - size))
        spans[rank] = range(first, min(first + size, len(row)))
    return spans


class Window:
    """The free actions of a window, and the search for a better order of them.

    Attributes:
        nodes: of the search tree, once solved.
    """

    def __init__(self, plan: Plan, spans: dict[int, range]) -> None:
        tables, ends, tails = plan.tables, plan.ends, plan.tails
        self.plan, self.spans, self.nodes = plan, spans, 0
        self.left = {rank: plan.rows[rank][span.start : span.stop] for rank, span in spans.items()}
        free = {action for actions in self.left.values() for action in actions}
        self.free = free
        # Per rank: when it is free, what it holds, and the tail behind its last free action.
        self.clocks: dict[int, float] = {}
        self.held: dict[int, float] = {}
        self.behind: dict[int, float] = {}
        for rank, span in spans.items():
            row = plan.rows[rank]
            self.clocks[rank] = ends[row[span.start - 1]] if span.start else 0.0
            self.held[rank] = sum(tables.change[action] for action in row[: span.start])
            after = row[span.stop] if span.stop < len(row) else None
            self.behind[rank] = 0.0 if after is None else tables.duration[after] + tails[after]
        self.heads: dict[int, float] = {}
        self.tails: dict[int, float] = {}
        for action in sorted(free, key=ends.__getitem__):
            read = tables.source[action]
            if read in free:
                ready = self.heads.get(read, 0.0) + tables.duration[read] + tables.delay[action]
            else:
                ready = ends[read] + tables.delay[action] if read >= 0 else 0.0
            self.heads[action] = ready
        for action in sorted(free, key=ends.__getitem__, reverse=True):
            self.tails[action] = max(
                (
                    tables.delay[reader]
                    + tables.duration[reader]
                    + (self.tails.get(reader, 0.0) if reader in free else tails[reader])
                    for reader in plan.readers[action]
                ),
                default=0.0,
            )
        # The longest path through the window: a better order makes it shorter.
        longest = max(
            *(ends[action] + self.tails[action] for action in free),
            *(ends[row[-1]] + self.behind[rank] for rank, row in self.left.items()),
        )
        self.best = longest - tables.problem.slack
        self.orders: dict[int, list[int]] | None = None
        self.chosen: dict[int, list[int]] = {rank: [] for rank in spans}
        self.done: dict[int, float] = {}

    def solve(self) -> list[list[int]] | None:
        """The rows with a better order of the free actions, or None if there is none."""
        self._search(0.0)
        if self.orders is None:
            return None
        rows = self.plan.rows.copy()
        for rank, span in self.spans.items():
            row = rows[rank]
            rows[rank] = [*row[: span.start], *self.orders[rank], *row[span.stop :]]
        return rows

    def _search(self, value: float) -> None:
        """Take up from here: `value` is the longest path through the actions that are ordered."""
        if self.nodes >= _NODES:
            return
        self.nodes += 1
        tables, done, free, tails = self.plan.tables, self.done, self.free, self.tails
        first_end, first_rank = math.inf, -1
        ready: list[tuple[float, float, int, int]] = []
        for rank, left in self.left.items():
            if not left:
                continue
            clock, total, soonest = self.clocks[rank], 0.0, math.inf
            room = tables.problem.memory[rank] * (1 + 1e-9) - self.held[rank]
            for action in left:
                read, time = tables.source[action], tables.duration[action]
                start = self.heads[action]
                waits = read in free and read not in done
                if read in done:
                    start = done[read] + tables.delay[action]
                start = max(start, clock)
                soonest = min(soonest, start)
                total += time
                if start + time + tails[action] >= self.best:
                    return
                if not waits and tables.change[action] <= room:
                    ready.append((-tails[action], start, action, rank))
                    if start + time < first_end:
                        first_end, first_rank = start + time, rank
            if soonest + total + self.behind[rank] >= self.best:
                return
        if first_rank < 0:
            if not any(self.left.values()) and value < self.best:
                self.best = value - tables.problem.slack
                self.orders = {rank: row.copy() for rank, row in self.chosen.items()}
            return
        left, chosen = self.left[first_rank], self.chosen[first_rank]
        clock, held = self.clocks[first_rank], self.held[first_rank]
        for tail, start, action, rank in sorted(ready):
            if rank != first_rank or start >= first_end:
                continue
            end = start + tables.duration[action]
            at = left.index(action)
            del left[at]
            chosen.append(action)
            done[action] = self.clocks[rank] = end
            self.held[rank] = held + tables.change[action]
            behind = end + self.behind[rank] if not left else 0.0
            self._search(max(value, end - tail, behind))
            self.clocks[rank], self.held[rank] = clock, held
            del done[action]
            chosen.pop()
            left.insert(at, action)
