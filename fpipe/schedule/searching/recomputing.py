"""The choice of the stages that compute again what they do not keep, together with the order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeVar

from fpipe.errors import ScheduleError
from fpipe.schedule.bounds.makespan import Memory, Objective, lower_bound
from fpipe.schedule.cost import Cost

_EVERY: Final = 5  # stages: for so many, all choices are tried
_PROBES: Final = 0.5  # the share of the seconds for choices that are known from the start
_FLIPS: Final = 0.8  # and up to which share of them others are tried

Choice: TypeAlias = tuple[str, ...]  # per stage, "full" or "none"


class Case(NamedTuple):
    """A choice on a placement.

    Attributes:
        bound: a lower bound of its orders.
        placement: the rank of each stage.
        remat: the choice.
        cost: what it makes of the cost.
    """

    bound: float
    placement: tuple[int, ...]
    remat: Choice
    cost: Cost


class Found(Protocol):
    """The result of a search for one choice."""

    @property
    def value(self) -> float: ...

    @property
    def bound(self) -> float: ...


Result = TypeVar("Result", bound=Found)


class Task(NamedTuple):
    """The arguments of a search that bounds depend on."""

    microbatches: int
    cost: Cost
    memory: Memory
    objective: Objective

    def case(self, placement: tuple[int, ...], remat: Choice) -> Case:
        """A choice and its bound.

        Raises:
            ScheduleError: the cost does not fit the placement, or the memory admits no schedule.
        """
        cost = self.cost.with_remat(remat, placement)
        return Case(self._bound(placement, cost), placement, remat, cost)

    def bound_of_all(self, placement: tuple[int, ...]) -> float:
        """A bound for every choice: all compute nothing again, and keep the least."""
        nothing = replace(self.cost, recompute=0)
        stages = len(placement)
        frugal = nothing.with_remat(["full"] * stages, placement)
        return self._bound(placement, frugal)

    def _bound(self, placement: tuple[int, ...], cost: Cost) -> float:
        return lower_bound(
            placement, self.microbatches, cost, self.memory, objective=self.objective, effort=0
        )


def search_with_remat(
    task: Task,
    placements: Sequence[tuple[int, ...]],
    search: Callable[[Case, float, Result | None], Result],
    seconds: float | None,
) -> tuple[Case, Result, float]:
    """The best choice, with its order, and a lower bound of all choices.

    All choices are tried where stages are few. Else those that are made by hand, none, all, the
    first stages or the stages of the first ranks, and then those that differ in one stage from
    the best, as long as that helps. One whose bound is above the best value is left out.

    Args:
        task: what is searched for.
        placements: those to choose from.
        search: the search for one case, for so many seconds, from a result for a similar one.
        seconds: of it all; None where each search has a budget of its own.

    Raises:
        ScheduleError: no placement and no choice admits a schedule.
    """
    begun = time.thread_time()

    def left(share: float) -> float:
        if seconds is None:
            return 0.0
        return max(0.0, begun + share * seconds - time.thread_time())

    cases, refusal = _cases(task, ((p, remat) for p in placements for remat in _usual(p)))
    if not cases:
        assert refusal is not None
        raise refusal
    best: tuple[Case, Result] | None = None
    bounds = {case[1:3]: case.bound for case in cases}
    for at, case in enumerate(cases):
        if best is not None and (
            case.bound >= best[1].value * (1 - 1e-9) or (seconds is not None and left(1.0) <= 0)
        ):
            continue
        found = search(case, left(_PROBES) / (len(cases) - at), None)
        bounds[case[1:3]] = max(case.bound, found.bound)
        if best is None or found.value < best[1].value:
            best = case, found
    assert best is not None
    tried, better = set(bounds), True
    while better:
        better = False
        here, _ = best
        flips, _ = _cases(task, ((here.placement, remat) for remat in _flipped(here.remat)))
        for at, case in enumerate(flips):
            if case[1:3] in tried or case.bound >= best[1].value * (1 - 1e-9):
                continue
            if seconds is not None and left(_FLIPS) <= 0:
                break
            tried.add(case[1:3])
            found = search(case, left(_FLIPS) / (len(flips) - at), best[1])
            if found.value < best[1].value:
                best, better = (case, found), True
    if seconds is not None and left(1.0) > 0:
        found = search(best[0], left(1.0), best[1])
        if found.value < best[1].value:
            best = best[0], found
    every = all(len(placement) <= _EVERY for placement in placements)
    bound = min(bounds.values()) if every else min(map(task.bound_of_all, placements))
    return *best, bound


def _cases(
    task: Task, choices: Iterable[tuple[tuple[int, ...], Choice]]
) -> tuple[list[Case], ScheduleError | None]:
    """Those that admit a schedule, the least bound first, and why the first of the others does not.

    A placement that the cost does not fit is left out, too.
    """
    cases, refusal = [], None
    for placement, remat in choices:
        try:
            cases.append(task.case(placement, remat))
        except ScheduleError as error:
            refusal = refusal or error
    return sorted(cases, key=lambda case: (case.bound, case.remat.count("full"))), refusal


def _usual(placement: Sequence[int]) -> Iterator[Choice]:
    """All choices of few stages; else of many those that are made by hand."""
    stages = len(placement)
    if stages <= _EVERY:
        yield from product(("none", "full"), repeat=stages)
        return
    choices: dict[Choice, None] = {}
    for count in range(stages + 1):
        choices[("full",) * count + ("none",) * (stages - count)] = None
    for count in range(1, max(placement) + 1):
        choices[tuple("full" if rank < count else "none" for rank in placement)] = None
    yield from choices


def _flipped(remat: Choice) -> Iterator[Choice]:
    """The choices that differ in one stage."""
    for stage, choice in enumerate(remat):
        other = "none" if choice == "full" else "full"
        yield (*remat[:stage], other, *remat[stage + 1 :])
