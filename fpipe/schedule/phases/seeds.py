"""Seeds of a search: the families that fit the placement and the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, product
from typing import Any, NamedTuple

from fpipe.errors import ScheduleError
from fpipe.schedule.action import Action, Op
from fpipe.schedule.families.building_blocks import v_half, v_min
from fpipe.schedule.families.looped import (
    group_1f1b,
    group_size,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
)
from fpipe.schedule.families.single_stage import eager_1f1b, gpipe, one_f_one_b, zb_h1, zb_h2
from fpipe.schedule.families.v_shaped import dualpipev, zbv
from fpipe.schedule.orders.evaluator import Evaluator, make_evaluator
from fpipe.schedule.orders.greedy_v import greedy_v
from fpipe.schedule.orders.list_scheduler import list_schedule
from fpipe.schedule.orders.problem import (
    Candidate,
    Order,
    Problem,
    by_size,
    rename_microbatches,
    to_order,
    to_schedule,
)
from fpipe.schedule.orders.zero_bubble import automatic_order, zb_auto
from fpipe.schedule.phases.breeding import known_policies
from fpipe.schedule.phases.portfolio import Phase, Step, without_gc
from fpipe.schedule.placements import linear, looped, vee
from fpipe.schedule.schedule import Schedule
from fpipe.schedule.stage_costs import StageCosts

GUESSED = 100_000  # actions: above it, families are compared on fewer microbatches
_BEST = 2  # families that are made in full then
_UNNAMED = ("greedy_v", "one_by_one")  # families of the search alone
_GUESS = 8.0  # cost of a comparison, in iterations


class Maker(NamedTuple):
    """A family on a placement, as a function of the number of microbatches alone.

    Attributes:
        make: the function; it returns None, or raises a `ScheduleError`, where there is none.
        step: it makes a schedule of the same kind only of multiples of that many microbatches.
    """

    make: Callable[[int], Schedule | None]
    step: int = 1


def makers(problem: Problem) -> list[Maker]:
    """The families of a placement.

    The last is one microbatch after the other: the slowest, and possible wherever anything is.
    """
    ranks, placement, count = problem.ranks, problem.placement, problem.microbatches
    stages = len(placement) // ranks
    families: list[Maker] = []

    def add(family: Callable[..., Schedule], step: int = 1, **arguments: Any) -> None:
        families.append(
            Maker(lambda count: family(ranks=ranks, microbatches=count, **arguments), step)
        )

    if placement == linear(ranks):
        for family in (one_f_one_b, zb_h1, zb_h2, eager_1f1b, gpipe):
            add(family)
        add(zb_auto)
        # For these costs, in all the memory there is and in the usual: more is not always better.
        families.append(Maker(partial(_in_all_memory, problem)))
        families.append(Maker(partial(_in_usual_memory, problem)))
    if placement == vee(ranks):
        for family in (zbv, v_half, v_min, dualpipev):
            add(family)
        families.append(Maker(partial(_greedy_v_for, problem)))
    if placement == looped(ranks, stages):
        if stages > 1:  # with one stage they are `zb_h1` and `eager_1f1b`
            add(interleaved_zero_bubble, stages_per_rank=stages)
            add(interleaved_1f1b, stages_per_rank=stages)
        add(looped_bfs, stages_per_rank=stages)
        groups = [size for size in range(max(1, ranks // 2), ranks + 1) if count % size == 0]
        for size in sorted({*groups, group_size(ranks=ranks, microbatches=count)}):
            add(group_1f1b, step=size, stages_per_rank=stages, group=size)
    return [*families, Maker(partial(_one_by_one, placement))]


def named_families(problem: Problem) -> Iterator[Schedule]:
    """The schedules of `fpipe.schedules` that exist for a problem and fit its memory."""
    for maker in makers(problem):
        try:
            schedule = maker.make(problem.microbatches)
        except ScheduleError:
            continue
        if schedule is None or schedule.name in _UNNAMED:
            continue
        if order_of(problem, schedule) is not None:
            yield schedule


def _in_all_memory(problem: Problem, microbatches: int) -> Schedule:
    """`zb_auto` for the cost, the memory and the objective of a problem."""
    problem = problem.resized(microbatches)
    return to_schedule(problem, automatic_order(problem), name="zb_auto")


def _in_usual_memory(problem: Problem, microbatches: int) -> Schedule:
    """`zb_auto` for the cost of a problem; fewer microbatches all have the mean size."""
    cost = problem.cost_of(microbatches)
    return zb_auto(ranks=problem.ranks, microbatches=microbatches, cost=cost)


def _greedy_v_for(problem: Problem, microbatches: int) -> Schedule | None:
    """`greedy_v` for a problem of so many microbatches."""
    problem = problem.resized(microbatches)
    order = greedy_v(problem)
    return None if order is None else to_schedule(problem, order, name="greedy_v")


def seeds(problems: Sequence[Problem]) -> Phase:
    """The orders of the families that exist for these problems and fit their memory; where
    microbatches differ in size, also with the microbatches arranged by size.

    In large problems only the most promising ones: the time of a periodic schedule grows evenly
    with the microbatches, so two smaller sizes predict the time of the full one.
    """
    candidates: list[Candidate] = []
    for step in _family_steps(problems):
        if step.candidate is not None:
            candidates.append(step.candidate)
        yield step
    if problems[0].uneven:
        yield from arrangements(candidates)


def _family_steps(problems: Sequence[Problem]) -> Phase:
    pairs = [(problem, maker) for problem in problems for maker in makers(problem)]
    if all(problem.actions <= GUESSED for problem in problems):
        for problem, maker in pairs:
            order = _family_order(problem, maker)
            yield Step(problem.scale, None if order is None else Candidate(problem, order))
        return
    guesses = []
    for at, (problem, maker) in enumerate(pairs):
        guesses.append((_guess(problem, maker), at))
        yield Step(_GUESS)
    guesses.sort()
    yielded, best = 0, 0.0
    for guess, at in guesses:
        if yielded == _BEST or (yielded and guess > 1.01 * best):
            return
        # A family may exist, and fit, in the smaller sizes alone.
        problem, maker = pairs[at]
        if (order := _family_order(problem, maker)) is not None:
            yielded, best = yielded + 1, best or guess
            yield Step(problem.scale, Candidate(problem, order))


def _one_by_one(placement: tuple[int, ...], microbatches: int) -> Schedule:
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    stages = list(enumerate(placement))
    for microbatch in range(microbatches):
        for stage, rank in stages:
            rows[rank].append(Action(stage, Op.F, microbatch))
        for stage, rank in reversed(stages):
            rows[rank].append(Action(stage, Op.B, microbatch))
    return Schedule(placement, rows, name="one_by_one")


def _guess(problem: Problem, maker: Maker) -> float:
    step = maker.step
    first = -(-2 * problem.ranks // step) * step
    sizes = (first, first + max(1, problem.ranks // step) * step)
    if sizes[1] >= problem.microbatches:
        sizes = (problem.microbatches,) * 2
    values = []
    for size in dict.fromkeys(sizes):
        order = _family_order(problem.resized(size), maker)
        if order is None:
            return float("inf")
        values.append(order.value)
    if len(values) == 1:
        return values[0]
    slope = (values[1] - values[0]) / (sizes[1] - sizes[0])
    return values[1] + slope * (problem.microbatches - sizes[1])


def _family_order(problem: Problem, maker: Maker) -> Order | None:
    """The order of a family's schedule, or None where it does not exist or fit."""
    with without_gc():
        try:
            schedule = maker.make(problem.microbatches)
        except ScheduleError:
            return None
        return None if schedule is None else order_of(problem, schedule)


def order_of(problem: Problem, schedule: Schedule) -> Order | None:
    """The order of a schedule that can run, or None where it does not fit the memory."""
    for row, limit in zip(schedule.actions, problem.memory, strict=True):
        if _peak(row, problem.costs, problem.amounts) > limit * (1 + 1e-9):
            return None
    order = to_order(problem, schedule)
    if problem.simulated:
        return problem.played(order)
    # Not by `simulate`, whose timeline would cost more than all the rest.
    return replace(order, value=problem.value_of(schedule.actions))


def _peak(row: Sequence[Action], costs: StageCosts, amounts: Sequence[float]) -> float:
    held = peak = 0.0
    for stage, op, microbatch in row:
        if microbatch is None:
            continue
        if op == Op.F:
            held += costs.activation[stage] * amounts[microbatch]
        elif op == Op.B:
            held -= costs.activation[stage] * amounts[microbatch]
        elif op == Op.I:
            held -= costs.freed_by_i[stage] * amounts[microbatch]
        elif op == Op.W:
            held += (costs.freed_by_i[stage] - costs.activation[stage]) * amounts[microbatch]
        if held > peak:
            peak = held
    return peak


_FEW = 4  # orders whose microbatches change places
_PLAIN = 4  # policies that are played with microbatches arranged by size
_PLAYED = 300_000  # actions of each placement, in so doing: half a second


def arrangements(candidates: Sequence[Candidate]) -> Phase:
    """The best candidates with their microbatches arranged by size, and the orders of plain
    policies, which fit any memory; fewer in large problems."""
    few = sorted(candidates, key=lambda candidate: candidate.value)[:_FEW]
    for problem, order in few:
        for other in arranged(make_evaluator(problem), order):
            yield Step(problem.scale, Candidate(problem, other))
    for problem in {id(each.problem): each.problem for each in candidates}.values():
        turns = (problem.turn, *map(tuple, by_size(problem.sizes, problem.turn)))
        ways = product(known_policies(problem)[:_PLAIN], turns)
        for policy, turn in islice(ways, max(2, _PLAYED // problem.actions)):
            played = list_schedule(problem, replace(policy, turn=turn))
            yield Step(problem.scale, None if played is None else Candidate(problem, played))


def arranged(evaluator: Evaluator, order: Order) -> Iterator[Order]:
    """An order with its microbatches arranged by size, where that fits the memory.

    Any two microbatches may change places on all ranks at once: all dependencies stay as they were.
    """
    problem = evaluator.problem
    # The microbatches as the first stage takes them.
    first, count = order.rows[problem.placement[0]], problem.microbatches
    turn = tuple(action for action in first if action < count)
    for chosen in by_size(problem.sizes, turn):
        changed = rename_microbatches(problem, order, dict(zip(turn, chosen, strict=True)))
        if evaluator.fits_all(changed):
            value, _ = evaluator.times(changed.rows, changed.fused)
            yield replace(changed, value=value)
