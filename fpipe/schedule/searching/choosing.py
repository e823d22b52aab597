"""The search for the best of several costs of one task, each of which has its own best order.

A kind of choice, such as which stages compute again, knows the usual choices of a placement, the
neighbours of one, and what the cost is with one. Each is searched on its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from fpipe.errors import ScheduleError
from fpipe.schedule.bounds.makespan import Memory, Objective, lower_bound
from fpipe.schedule.cost import Cost
from fpipe.schedule.families.single_stage import one_f_one_b
from fpipe.schedule.placements import linear
from fpipe.schedule.schedule import Schedule
from fpipe.schedule.searching.result import SearchResult
from fpipe.schedule.simulator import simulate, with_whole_stage

_PROBES: Final = 0.5  # the share of the seconds for choices that are known from the start
_FLIPS: Final = 0.8  # and up to which share of them others are tried

Choice: TypeAlias = tuple[Any, ...]  # an entry for each stage


class Kind(Protocol):
    """A kind of choice: ``"remat"`` or ``"cut"``, as the result names it."""

    @property
    def name(self) -> str: ...

    def complete(self, placement: Sequence[int]) -> bool:
        """Whether `usual` has all choices."""
        ...

    def usual(self, placement: Sequence[int]) -> Iterator[Choice]: ...

    def neighbours(self, choice: Choice) -> Iterator[Choice]: ...

    def cost_of(self, cost: Cost, choice: Choice, placement: Sequence[int]) -> Cost: ...

    def bound_of_all(self, task: Task, placement: tuple[int, ...]) -> float:
        """A lower bound for every choice."""
        ...


class Case(NamedTuple):
    """A choice on a placement.

    Attributes:
        bound: a lower bound of its orders.
        placement: the rank of each stage.
        choice: an entry for each stage.
        cost: what it makes of the cost.
    """

    bound: float
    placement: tuple[int, ...]
    choice: Choice
    cost: Cost


_Order: TypeAlias = Callable[[Case, float, SearchResult | None], SearchResult]


class Task(NamedTuple):
    """The arguments of a search that bounds depend on, and the kind of choice."""

    microbatches: int
    cost: Cost
    memory: Memory
    objective: Objective
    kind: Kind

    def case(self, placement: tuple[int, ...], choice: Choice) -> Case:
        """A choice and its bound.

        Raises:
            ScheduleError: the cost does not fit the placement, or the memory admits no schedule.
        """
        cost = self.kind.cost_of(self.cost, choice, placement)
        return Case(self.bound(placement, cost), placement, choice, cost)

    def bound(self, placement: tuple[int, ...], cost: Cost) -> float:
        """A lower bound for a cost."""
        return lower_bound(
            placement, self.microbatches, cost, self.memory, objective=self.objective, effort=0
        )


def best_choice(
    task: Task,
    search: Callable[..., SearchResult],
    placements: Sequence[tuple[int, ...]],
    *,
    start: Schedule | None,
    seconds: float,
    seed: int,
    iterations: int | None,
) -> SearchResult:
    """The search for the order of each choice, and the best of all."""
    spent = 0

    def order(case: Case, seconds: float, similar: SearchResult | None) -> SearchResult:
        nonlocal spent
        search_one = partial(
            search,
            ranks=max(case.placement) + 1,
            microbatches=task.microbatches,
            cost=case.cost,
            memory=task.memory,
            placement=case.placement,
            seconds=seconds,
            seed=seed,
            iterations=iterations,
        )
        begin = start if similar is None else similar.schedule
        try:
            result = search_one(start=begin)
        except ScheduleError:
            if begin is None:
                raise
            result = search_one()  # for what it begins with does not fit the memory
        spent += result.iterations
        return result

    cuts = task.kind.name == "cut"
    limit = None if iterations is not None else 0.7 * seconds if cuts else seconds
    case, result, bound = _search_choices(task, placements, order, limit)
    bought = None
    if cuts:
        bought = {**_bought(task, placements, order, 0.1 * seconds), "cut": result.value}
    chosen: dict[str, Any] = {task.kind.name: case.choice, "bought": bought}
    return replace(result, bound=bound, iterations=spent, **chosen)


def _search_choices(
    task: Task, placements: Sequence[tuple[int, ...]], order: _Order, seconds: float | None
) -> tuple[Case, SearchResult, float]:
    """The best choice, with its order, and a lower bound of all choices.

    The usual choices of its kind are tried, and then the neighbours of the best, as long as that
    helps. One whose bound is above the best value is left out.

    The search `order` is for one case, for so many seconds, from a result for a similar one.
    Without `seconds` each search has a budget of its own.

    Raises:
        ScheduleError: no placement and no choice admits a schedule.
    """
    begun = time.thread_time()

    def left(share: float) -> float:
        if seconds is None:
            return 0.0
        return max(0.0, begun + share * seconds - time.thread_time())

    usual = task.kind.usual
    cases, refusal = _cases(task, ((p, choice) for p in placements for choice in usual(p)))
    if not cases:
        assert refusal is not None
        raise refusal
    best: tuple[Case, SearchResult] | None = None
    bounds = {case[1:3]: case.bound for case in cases}
    for at, case in enumerate(cases):
        if best is not None and (
            case.bound >= best[1].value * (1 - 1e-9) or (seconds is not None and left(1.0) <= 0)
        ):
            continue
        result = order(case, left(_PROBES) / (len(cases) - at), None)
        bounds[case[1:3]] = max(case.bound, result.bound)
        if best is None or result.value < best[1].value:
            best = case, result
    assert best is not None
    tried, better = set(bounds), True
    while better:
        better = False
        here, _ = best
        around = task.kind.neighbours(here.choice)
        flips, _ = _cases(task, ((here.placement, choice) for choice in around))
        for at, case in enumerate(flips):
            if case[1:3] in tried or case.bound >= best[1].value * (1 - 1e-9):
                continue
            if seconds is not None and left(_FLIPS) <= 0:
                break
            tried.add(case[1:3])
            result = order(case, left(_FLIPS) / (len(flips) - at), best[1])
            if result.value < best[1].value:
                best, better = (case, result), True
    if seconds is not None and left(1.0) > 0:
        result = order(best[0], left(1.0), best[1])
        if result.value < best[1].value:
            best = best[0], result
    if all(map(task.kind.complete, placements)):
        return *best, min(bounds.values())
    return *best, min(task.kind.bound_of_all(task, placement) for placement in placements)


def _cases(
    task: Task, choices: Iterable[tuple[tuple[int, ...], Choice]]
) -> tuple[list[Case], ScheduleError | None]:
    """Those that admit a schedule, the least bound first, and why the first of the others does not.

    A placement that the cost does not fit is left out, too.
    """
    cases, refusal = [], None
    for placement, choice in choices:
        try:
            cases.append(task.case(placement, choice))
        except ScheduleError as error:
            refusal = refusal or error
    return sorted(cases, key=lambda case: case.bound), refusal


def _bought(
    task: Task, placements: Sequence[tuple[int, ...]], order: _Order, seconds: float
) -> dict[str, float]:
    """The values with layers cut evenly: of 1F1B, with an order of its own, on other placements."""
    values: dict[str, float] = {}
    for placement in placements:
        try:
            case = task.case(placement, next(task.kind.usual(placement)))
            value = order(case, seconds, None).value
        except ScheduleError:
            continue  # for the memory, or the layers, are too few
        values["placement"] = min(value, values.get("placement", value))
        if placement == linear(len(placement)):
            plain = one_f_one_b(ranks=len(placement), microbatches=task.microbatches)
            plain = with_whole_stage(plain, case.cost)
            values = {"1F1B": simulate(plain, case.cost).makespan, "order": value, **values}
    return values
