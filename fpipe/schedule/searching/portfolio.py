"""A portfolio of phases that search side by side, none of which knows how long the search lasts.

A phase is an iterator: each of its steps does a little work and says what that cost and what it
found. The steps of all phases are taken in an order that depends on their costs alone. So a search
is the beginning of any longer one, and more time never gives a worse answer; and who watches the
time is one loop.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from fpipe.schedule.searching.problem import Candidate, Problem

_KEPT = 16  # candidates that phases may start from
_LATE = 0.15  # of the time that is given: a step may end so much after it
_IDLE = 5.0  # iterations for which a phase that waits is left alone


class Step(NamedTuple):
    """A little work of a phase.

    Attributes:
        cost: in iterations; one is about what it takes to play a policy.
        found: what it came to, whether it is better than others or not.
    """

    cost: float
    found: Candidate | None = None


Phase: TypeAlias = Iterator[Step]


@dataclass
class Standing:
    """What all phases know of each other: the best candidates, and what cannot be better.

    Attributes:
        candidates: the best, of different values, the very best first.
        bounds: per placement, what none of its orders is below.
    """

    candidates: list[Candidate] = field(default_factory=list)
    bounds: dict[tuple[int, ...], float] = field(default_factory=dict)

    @property
    def best(self) -> Candidate:
        """The very best."""
        return self.candidates[0]

    @property
    def value(self) -> float:
        """Of the best; infinite where there is none."""
        return self.candidates[0].value if self.candidates else math.inf

    @property
    def bound(self) -> float:
        """Below which no candidate of any placement is."""
        return min(self.bounds.values())

    def offer(self, found: Candidate) -> None:
        """Keep a candidate if it is among the best; of equal ones the first."""
        at = len(self.candidates)
        while at and found.value < self.candidates[at - 1].value:
            at -= 1
        if not at or self.candidates[at - 1].value < found.value:
            self.candidates.insert(at, found)
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
    """How much of a search is used up.

    The time is that of the processor in the searching thread, so that a busy machine takes nothing
    away; on an idle one it is the time on the wall.

    Attributes:
        seconds: how long to search, where `iterations` is None.
        iterations: how much work to do; the clock then plays no part.
        spent: work done.
        step: how long a step of a phase may take of which none is known, in seconds.
        end: how long it takes to make the result when the phases are over.
        start: what the clock showed at the beginning.
    """

    seconds: float
    iterations: int | None
    spent: float = 0.0
    step: float = 0.0
    end: float = 0.0
    start: float = field(default_factory=time.thread_time)

    @property
    def counts(self) -> bool:
        """Whether it counts work, and knows no time."""
        return self.iterations is not None

    def allows(self, more: float, free: bool = False) -> bool:
        """Whether a step may begin that is expected to take so many seconds."""
        if self.iterations is not None:
            return free or self.spent < self.iterations
        used = time.thread_time() - self.start + self.end
        return used < self.seconds and used + more < (1 + _LATE) * self.seconds


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection, which takes half of the time in which a million actions are made
    and finds nothing: they are in no circles."""
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
        phase: the phase. If it is free, it depends on nothing that others find.
        free: its work is not counted, and where iterations are, it comes to its end.
    """

    share: float
    phase: Phase
    free: bool = False


def run(entries: Sequence[Entry], standing: Standing, meter: Meter) -> None:
    """Take steps of the phases, until nothing can be better, none is left, or the meter stops it.

    A phase whose step costs nothing and finds nothing waits for others to find something.

    Args:
        entries: the phases.
        standing: where to put what they find.
        meter: is asked before each step; where it knows time, once there is a candidate at all.
    """
    used = [0.0] * len(entries)
    longest = [meter.step] * len(entries)
    left = set(range(len(entries)))
    while left and not standing.solved:
        at = min(left, key=lambda at: (used[at], at))
        share, phase, free = entries[at]
        begins = meter.counts or standing.candidates
        if begins and not meter.allows(longest[at], free=free):
            left = {other for other in left if entries[other].free} if meter.counts else set()
            continue
        begun = time.thread_time()
        step = next(phase, None)
        longest[at] = max(longest[at], time.thread_time() - begun)
        if step is None:
            left.remove(at)
        elif step.found is not None:
            standing.offer(step.found)
        if step is not None:
            used[at] += (step.cost if step.cost or step.found else _IDLE) / share
            meter.spent += 0.0 if free else step.cost


_LOOKS: Final = 40  # states that take about as long as an iteration


def bounding(problems: Sequence[Problem], standing: Standing, efforts: Sequence[int]) -> Phase:
    """Bounds of each placement that may hold something better, with more and more effort.

    Args:
        problems: one per placement.
        standing: learns of the bounds.
        efforts: as `fpipe.lower_bound` takes them.
    """
    for effort in efforts:
        for problem in problems:
            if not standing.hopeless(problem):
                # Paid for before, so that a short search does not spend all it has on one bound.
                for _ in range(round(effort / _LOOKS)):
                    yield Step(1.0)
                standing.raise_bound(problem, problem.examined(effort).bound)
