"""A portfolio of phases that search side by side, none of which knows how long the search lasts.

A phase is an iterator: each step does a little work, and yields its cost and perhaps a candidate.
The order of the steps of all phases depends on their costs alone. So a search is the beginning of
any longer one, and more time never gives a worse answer. One loop watches the time.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from fpipe.live_line import advance
from fpipe.schedule.orders.evaluator import Evaluator
from fpipe.schedule.orders.problem import Candidate, Order, Problem

_KEPT = 16  # candidates that phases may start from
_TIES = 4  # candidates of the best value
_LATE = 0.15  # how far a step may end after the time limit, as a share of it
_IDLE = 5.0  # iterations for which a phase that waits is left alone


class Step(NamedTuple):
    """A little work of a phase.

    Attributes:
        cost: in iterations; one is about the time of one run of the list scheduler.
        candidate: the result, whether it is better than others or not.
    """

    cost: float
    candidate: Candidate | None = None


Phase: TypeAlias = Iterator[Step]


@dataclass
class Incumbents:
    """The best candidates of all phases, and the bounds of each placement.

    Attributes:
        candidates: the best, of different values, the very best first.
        bounds: per placement, a lower bound of its orders.
        ties: the first few candidates with the value of the best.
    """

    candidates: list[Candidate] = field(default_factory=list)
    bounds: dict[tuple[int, ...], float] = field(default_factory=dict)
    ties: list[Candidate] = field(default_factory=list)

    @property
    def best(self) -> Candidate:
        """The best candidate."""
        return self.candidates[0]

    @property
    def value(self) -> float:
        """The value of the best candidate; infinite where there is none."""
        return self.candidates[0].value if self.candidates else math.inf

    @property
    def bound(self) -> float:
        """A lower bound of every placement."""
        return min(self.bounds.values())

    def offer(self, candidate: Candidate) -> None:
        """Keep a candidate if it is among the best; of equal ones the first."""
        if candidate.value < self.value:
            self.ties = [candidate]
        elif candidate.value == self.value and len(self.ties) < _TIES:
            self.ties.append(candidate)
        at = len(self.candidates)
        while at and candidate.value < self.candidates[at - 1].value:
            at -= 1
        if not at or self.candidates[at - 1].value < candidate.value:
            self.candidates.insert(at, candidate)
            del self.candidates[_KEPT:]

    def raise_bound(self, problem: Problem, bound: float) -> None:
        """Learn that no order of a problem is below `bound`."""
        self.bounds[problem.placement] = max(bound, self.bounds.get(problem.placement, 0.0))

    def hopeless(self, problem: Problem) -> bool:
        """Whether no order of this placement can be better than the best candidate."""
        return self.value <= self.bounds[problem.placement] * (1 + 1e-9)

    @property
    def solved(self) -> bool:
        """Whether nothing can be better."""
        return self.value <= self.bound * (1 + 1e-9)


@dataclass
class Meter:
    """The budget of a search, in seconds or in iterations.

    Seconds are processor time of the searching thread, so a busy machine takes nothing away; on an
    idle one they are wall time.

    Attributes:
        seconds: how long to search, where `iterations` is None.
        iterations: how much work to do; the clock then plays no part.
        spent: work done.
        step: the time to expect of the first step of a phase, in seconds.
        end: the time that it takes to make the result when the phases are over.
        start: the clock at the beginning.
    """

    seconds: float
    iterations: int | None
    spent: float = 0.0
    step: float = 0.0
    end: float = 0.0
    start: float = field(default_factory=time.thread_time)

    @property
    def counts(self) -> bool:
        """Whether the budget is in iterations."""
        return self.iterations is not None

    def allows(self, more: float, free: bool = False) -> bool:
        """Whether a step may begin that is expected to take so many seconds."""
        if self.iterations is not None:
            return free or self.spent < self.iterations
        used = time.thread_time() - self.start + self.end
        return used < self.seconds and used + more < (1 + _LATE) * self.seconds


@contextmanager
def without_gc() -> Iterator[None]:
    """Turn garbage collection off: it takes half of the time of making a million actions, and finds
    no cycles among them."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Entry(NamedTuple):
    """A phase in a portfolio.

    Attributes:
        share: of two phases, the one with twice the share does twice the work.
        phase: the phase. If it is free, it does not depend on the candidates of others.
        free: its work is not counted, and a budget in iterations lets it run to its end.
    """

    share: float
    phase: Phase
    free: bool = False


def run(entries: Sequence[Entry], incumbents: Incumbents, meter: Meter) -> None:
    """Take steps of the phases, until nothing can be better, none is left, or the budget is spent.

    A phase whose step costs nothing and has no candidate waits for candidates of others.

    A budget in seconds counts from the first candidate on.
    """
    used = [0.0] * len(entries)
    longest = [meter.step] * len(entries)
    left = set(range(len(entries)))
    while left and not incumbents.solved:
        at = min(left, key=lambda at: (used[at], at))
        share, phase, free = entries[at]
        begins = meter.counts or incumbents.candidates
        if begins and not meter.allows(longest[at], free=free):
            left = {other for other in left if entries[other].free} if meter.counts else set()
            continue
        advance(f"best {incumbents.best.value:g}" if incumbents.candidates else "")
        begun = time.thread_time()
        step = next(phase, None)
        longest[at] = max(longest[at], time.thread_time() - begun)
        if step is None:
            left.remove(at)
        elif step.candidate is not None:
            incumbents.offer(step.candidate)
        if step is not None:
            used[at] += (step.cost if step.cost or step.candidate else _IDLE) / share
            meter.spent += 0.0 if free else step.cost


_LOOKS: Final = 40  # states that take about as long as an iteration


def bounding(problems: Sequence[Problem], incumbents: Incumbents, efforts: Sequence[int]) -> Phase:
    """Raise the bound of each placement that may hold something better, with growing `efforts`."""
    for effort in efforts:
        for problem in problems:
            if not incumbents.hopeless(problem):
                # Paid for before, so that a short search does not spend all it has on one bound.
                for _ in range(round(effort / _LOOKS)):
                    yield Step(1.0)
                incumbents.raise_bound(problem, problem.examined(effort).bound)


def improving(
    evaluators: Mapping[tuple[int, ...], Evaluator],
    incumbents: Incumbents,
    improve: Callable[[Evaluator, Order], Phase],
) -> Phase:
    """Improve the candidates by a method, the best first, and those that others find later.

    The method need not improve again what it yields.
    """
    seen: dict[int, Order] = {}  # by identity, which lasts as long as they are kept
    begun: list[Phase] = []  # the last on top
    while True:
        for problem, order in incumbents.candidates:
            if id(order) not in seen and problem.placement in evaluators:
                # The best is first, and whatever was begun goes on after it.
                if not begun or order is incumbents.best.order:
                    seen[id(order)] = order
                    begun.append(improve(evaluators[problem.placement], order))
                break
        step = next(begun[-1], None) if begun else Step(0.0)
        if step is None:
            begun.pop()
            continue
        if step.candidate is not None:
            seen[id(step.candidate.order)] = step.candidate.order
        yield step
