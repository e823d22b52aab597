"""The search for a schedule together with its cut, or with what its stages compute again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from fpipe.errors import ScheduleError
from fpipe.schedule.families.single_stage import one_f_one_b
from fpipe.schedule.placements import linear
from fpipe.schedule.schedule import Schedule
from fpipe.schedule.searching.choosing import Case, Task, search_choices
from fpipe.schedule.searching.cutting import Cuts
from fpipe.schedule.searching.result import SearchResult
from fpipe.schedule.simulator import simulate, with_whole_stage


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

    limit = seconds if iterations is None else None
    if limit is not None and isinstance(task.kind, Cuts):
        limit *= 0.7
    case, result, bound = search_choices(task, placements, order, limit)
    if not isinstance(task.kind, Cuts):
        return replace(result, remat=case.choice, bound=bound, iterations=spent)
    bought = _bought(task, placements, order, 0.1 * seconds)
    bought["cut"] = result.value
    return replace(result, cut=case.choice, bought=bought, bound=bound, iterations=spent)


def _bought(
    task: Task,
    placements: Sequence[tuple[int, ...]],
    order: Callable[[Case, float, SearchResult | None], SearchResult],
    seconds: float,
) -> dict[str, float]:
    """The values with layers cut evenly: of 1F1B, with an order of its own, on other placements."""
    values: dict[str, float] = {}
    for placement in placements:
        try:
            case = task.case(placement, next(task.usual(placement)))
            value = order(case, seconds, None).value
        except ScheduleError:
            continue  # for the memory, or the layers, are too few
        values["placement"] = min(value, values.get("placement", value))
        if placement == linear(len(placement)):
            plain = one_f_one_b(ranks=len(placement), microbatches=task.microbatches)
            plain = with_whole_stage(plain, case.cost)
            values = {"1F1B": simulate(plain, case.cost).makespan, "order": value, **values}
    return values
