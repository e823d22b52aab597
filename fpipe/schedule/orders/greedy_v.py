"""The greedy ZB-V: on a V, all ranks run a backward and then a forward, round by round.

Source: "Zero Bubble Pipeline Parallelism" (Qi et al., https://arxiv.org/abs/2401.10241), section 6,
whose authors' scheduler (zero-bubble-pipeline-parallelism) makes such a schedule for given costs.
This is the same rule, written anew, for costs that differ by stage.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import product
from typing import Final, NamedTuple

from fpipe.schedule.bounds.states import FORWARD, GRADIENT, WEIGHT
from fpipe.schedule.orders.problem import Order, Problem
from fpipe.schedule.placements import vee

# The passes of a microbatch over a rank: F down the V and up again, then I the same way back.
_DOWN, _UP, _BACK, _HOME = range(4)
_TRIED: Final = 8  # microbatches per rank on which the rules are compared


class _Rule(NamedTuple):
    """When a weight gradient may run in a wait that is shorter than it.

    Attributes:
        forward: before an F.
        home: before an I of the stages that go down; before the others always.
        spare: per rank, how much longer than here the longest wait of a rank was before.
    """

    forward: bool
    home: bool
    spare: tuple[float, ...]


def greedy_v(problem: Problem) -> Order | None:
    """The best order by this rule, or None where the memory does not fit it or there is no V.

    First the V fills: microbatches go down as long as none comes up, then those that come up and
    those that go down take turns. From then on every rank runs a backward and a forward in turn. A
    weight gradient runs where it fits a wait, where only it makes room, and where the rank would
    otherwise become the one that has waited longest. Where ranks waited in one try says in the next
    how long each of them may wait.
    """
    if problem.placement != vee(problem.ranks) or problem.ranks < 2:
        return None
    trial = problem.resized(min(problem.microbatches, _TRIED * problem.ranks))
    none, best, rule = (0.0,) * problem.ranks, math.inf, None
    for forward, home in product((True, False), repeat=2):
        spare, shortest = none, math.inf
        while True:
            tried = _Rule(forward, home, spare)
            run = _Run(trial, tried)
            if not run.finishes() or run.longest >= shortest:
                break
            shortest = run.longest
            spare = tuple(shortest - wait for wait in run.waits)
            if (value := run.order().value) < best:
                best, rule = value, tried
    if rule is None:
        return None
    run = _Run(problem, rule)
    return run.order() if run.finishes() else None


class _Run:
    """One try: ranks with their clocks, what they hold and what they have done."""

    def __init__(self, problem: Problem, rule: _Rule) -> None:
        costs, ranks, count = problem.costs, problem.ranks, problem.microbatches
        self.problem, self.rule = problem, rule
        self.last = ranks - 1
        self.rows: list[list[int]] = [[] for _ in range(ranks)]
        self.clocks, self.held, self.waits = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
        self.firsts = [0.0] * ranks
        self.longest = 0.0
        self.late: list[deque[tuple[int, int]]] = [deque() for _ in range(ranks)]
        # When the passes of each rank end, microbatch after microbatch.
        self.ends: list[list[list[float]]] = [[[] for _ in range(4)] for _ in range(ranks)]
        self.number = count
        # Per kind and stage: the time, and the change of memory.
        self.times = (costs.f, costs.i, costs.w)
        kept, freed = costs.activation, costs.freed_by_i
        left = [frees - has for has, frees in zip(kept, freed, strict=True)]
        self.changes = (kept, [-frees for frees in freed], left)

    def order(self) -> Order:
        """The actions that have been run."""
        if self.problem.simulated or self.problem.cost.has_transfers:
            return self.problem.played(Order(math.inf, self.rows, frozenset()))
        begun = self.firsts if self.problem.objective == "span" else [0.0] * len(self.firsts)
        value = max(end - first for end, first in zip(self.clocks, begun, strict=True))
        return Order(value, self.rows, frozenset())

    def finishes(self) -> bool:
        """Run everything; False where the memory does not admit it."""
        if not (self._fill_down() and self._fill_up()):
            return False
        for _ in range(2 * self.number):
            if not (self._backwards() and self._forwards()):
                return False
        for rank, late in enumerate(self.late):
            while late:
                self._weight(rank)
        return all(len(row) == 6 * self.number for row in self.rows)

    def _fill_down(self) -> bool:
        """Microbatches go down until the first one has come up to each rank."""
        for rank in range(self.last + 1):
            if not self._put(rank, _DOWN):
                return False
        memory, f, kept = self.problem.memory, self.problem.costs.f, self.problem.costs.activation
        for rank in range(self.last, -1, -1):
            coming = self._arrival(rank, _UP)
            while (
                coming is not None
                and self._done(rank, _DOWN) < self.number
                and self.clocks[rank] + f[rank] <= coming
                and self.held[rank] + kept[rank] * (2 + 2 * rank) <= memory[rank] * (1 + 1e-9)
            ):
                for upper in range(rank + 1):
                    if self._done(upper, _DOWN) < self.number and not self._put(upper, _DOWN):
                        return False
            if not self._put(rank, _UP):
                return False
        return True

    def _fill_up(self) -> bool:
        """Each rank runs as many forwards as the one before it, those down and those up in turn."""
        turn = _DOWN
        for rank in range(1, self.last + 1):
            while sum(self._done(rank, way) for way in (_DOWN, _UP)) < sum(
                self._done(rank - 1, way) for way in (_DOWN, _UP)
            ) or (self._done(rank, _UP) <= self._done(rank - 1, _UP) < self.number):
                for lower in range(self.last, rank - 1, -1):
                    if self._done(lower, turn) < self.number and not self._put(lower, turn):
                        return False
                turn = _UP - turn
        return True

    def _backwards(self) -> bool:
        """One I on each rank: first of the microbatches on their way home, the last rank first."""
        ranks = range(self.last + 1)
        ways = [_BACK] * len(ranks)
        for rank in ranks:
            if self._done(rank, _HOME) < self._done(rank, _BACK) and (
                self._arrival(rank, _HOME) is not None or self._done(rank, _BACK) == self.number
            ):
                ways[rank] = _HOME
        homeward = [rank for rank in reversed(ranks) if ways[rank] == _HOME]
        others = [rank for rank in ranks if ways[rank] == _BACK]
        return all(
            self._put(rank, ways[rank], fills=ways[rank] == _HOME or self.rule.home)
            for rank in (*homeward, *others)
        )

    def _forwards(self) -> bool:
        """One F on each rank that has one: up the V if that can be, else down."""
        for rank in range(self.last + 1):
            if self._done(rank, _UP) == self.number:
                continue
            if self._arrival(rank, _UP) is not None:
                way = _UP
            elif self._done(rank, _DOWN) < self.number and self._arrival(rank, _DOWN) is not None:
                way = _DOWN
            else:
                continue
            if not self._put(rank, way, fills=self.rule.forward):
                return False
        return True

    def _done(self, rank: int, way: int) -> int:
        return len(self.ends[rank][way])

    def _arrival(self, rank: int, way: int) -> float | None:
        """When the input of the next action of a pass arrives; None where it is not known yet."""
        costs, nth, stage = self.problem.costs, self._done(rank, way), self._stage(rank, way)
        if way in (_DOWN, _BACK):
            turns, source = rank == 0, rank - 1
        else:
            turns, source = rank == self.last, rank + 1
        if way == _DOWN and turns:
            return 0.0
        # Where it turns, the rank itself has run the pass before.
        ends = self.ends[rank][way - 1] if turns else self.ends[source][way]
        if nth >= len(ends):
            return None
        if way in (_DOWN, _UP):
            return ends[nth] + costs.down[stage - 1]
        # The loss is computed with the last F, and does not travel.
        return ends[nth] + (0.0 if way == _BACK and turns else costs.up[stage])

    def _stage(self, rank: int, way: int) -> int:
        return rank if way in (_DOWN, _HOME) else 2 * self.last + 1 - rank

    def _put(self, rank: int, way: int, *, fills: bool | None = None) -> bool:
        """Run the next action of a pass, after weight gradients as the rule says.

        A weight gradient may run in a wait that is shorter than it where `fills` is true. While the
        V fills it is None, and none runs but to make room.
        """
        arrival = self._arrival(rank, way)
        if arrival is None:
            return False
        kind, stage, late = (way > _UP), self._stage(rank, way), self.late[rank]
        while self.held[rank] + self.changes[kind][stage] > self.problem.memory[rank] * (1 + 1e-9):
            if not late:
                return False
            self._weight(rank)
        if fills is not None:
            while late and self.clocks[rank] + self.times[WEIGHT][late[0][0]] <= arrival:
                self._weight(rank)
            least = max(self.longest, self.rule.spare[rank]) - self.waits[rank]
            if fills and late and arrival - self.clocks[rank] > least:
                self._weight(rank)
        start = max(self.clocks[rank], arrival)
        if self.rows[rank]:
            self.waits[rank] += start - self.clocks[rank]
            self.longest = max(self.longest, self.waits[rank])
        else:
            self.firsts[rank] = start
        nth = self._done(rank, way)
        self._run(rank, stage, GRADIENT if kind else FORWARD, nth, start)
        self.ends[rank][way].append(self.clocks[rank])
        if kind:
            late.append((stage, nth))
        return True

    def _weight(self, rank: int) -> None:
        """Run the oldest weight gradient of a rank."""
        stage, microbatch = self.late[rank].popleft()
        self._run(rank, stage, WEIGHT, microbatch, self.clocks[rank])

    def _run(self, rank: int, stage: int, kind: int, microbatch: int, start: float) -> None:
        self.clocks[rank] = start + self.times[kind][stage]
        self.held[rank] += self.changes[kind][stage]
        self.rows[rank].append((stage * 3 + kind) * self.number + microbatch)
