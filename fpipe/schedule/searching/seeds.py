"""The families as seeds of a search: those whose placement, and whose memory, fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fpipe.errors import ScheduleError
from fpipe.schedule.action import Action, Op
from fpipe.schedule.cost import StageCosts
from fpipe.schedule.families.dualpipev import dualpipev
from fpipe.schedule.families.eager_1f1b import eager_1f1b
from fpipe.schedule.families.gpipe import gpipe
from fpipe.schedule.families.group_1f1b import group_1f1b
from fpipe.schedule.families.interleaved_1f1b import interleaved_1f1b
from fpipe.schedule.families.interleaved_zero_bubble import interleaved_zero_bubble
from fpipe.schedule.families.looped_bfs import looped_bfs
from fpipe.schedule.families.one_f_one_b import one_f_one_b
from fpipe.schedule.families.v_half import v_half
from fpipe.schedule.families.v_min import v_min
from fpipe.schedule.families.zb_auto import zb_auto
from fpipe.schedule.families.zb_h1 import zb_h1
from fpipe.schedule.families.zb_h2 import zb_h2
from fpipe.schedule.families.zbv import zbv
from fpipe.schedule.placements import linear, looped, vee
from fpipe.schedule.schedule import Schedule
from fpipe.schedule.searching.problem import Order, Problem, to_order
from fpipe.schedule.simulator import run_rows

Maker = Callable[[int], Schedule]  # from a number of microbatches
LARGE = 100_000  # actions: above it, families are compared on fewer microbatches
_IN_FULL = 2


def makers(problem: Problem) -> list[Maker]:
    """The families of a placement, as functions of the number of microbatches alone.

    The last is one microbatch after the other: the slowest, and possible wherever anything is.
    """
    families = _families(problem)
    return [*families, lambda count: _one_by_one(problem.placement, count)]


def _families(problem: Problem) -> list[Maker]:
    ranks, placement = problem.ranks, problem.placement
    stages = len(placement) // ranks

    def plain(family: Callable[..., Schedule], **arguments: int) -> Maker:
        return lambda count: family(ranks=ranks, microbatches=count, **arguments)

    if placement == linear(ranks):
        return [
            *(plain(family) for family in (one_f_one_b, zb_h1, zb_h2, eager_1f1b, gpipe)),
            lambda count: zb_auto(
                ranks=ranks, microbatches=count, memory=problem.memory, cost=problem.cost
            ),
        ]
    if placement == vee(ranks):
        return [plain(family) for family in (zbv, v_half, v_min, dualpipev)]
    if placement != looped(ranks, stages):
        return []
    families = (interleaved_zero_bubble, interleaved_1f1b, looped_bfs)
    groups = sorted({max(1, ranks // 2), (ranks + 1) // 2, ranks})
    return [
        *(plain(family, stages_per_rank=stages) for family in families),
        *(plain(group_1f1b, stages_per_rank=stages, group=group) for group in groups),
    ]


def seeds(problems: Sequence[Problem]) -> Iterator[tuple[Problem, Order]]:
    """The orders of the families that exist for these problems and fit their memory.

    In large problems only those that promise to be among the best: the time of a periodic schedule
    grows evenly with the microbatches, so two smaller sizes tell what the full one will take.
    """
    pairs = [(problem, maker) for problem in problems for maker in makers(problem)]
    if any(3 * len(p.placement) * p.microbatches > LARGE for p in problems):
        guesses = sorted((_guess(*pair), at) for at, pair in enumerate(pairs))
        chosen = [at for guess, at in guesses if guess <= 1.01 * guesses[0][0]]
        pairs = [pairs[at] for at in chosen[:_IN_FULL]]
    for problem, maker in pairs:
        if (order := _made(problem, maker)) is not None:
            yield problem, order


def _one_by_one(placement: tuple[int, ...], microbatches: int) -> Schedule:
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    there = list(enumerate(placement))
    for microbatch in range(microbatches):
        for stage, rank in there:
            rows[rank].append(Action(stage, Op.F, microbatch))
        for stage, rank in reversed(there):
            rows[rank].append(Action(stage, Op.B, microbatch))
    return Schedule(placement, rows, name="one_by_one")


def _guess(problem: Problem, maker: Maker) -> float:
    sizes = (2 * problem.ranks, 3 * problem.ranks)
    values = []
    for size in sizes:
        order = _made(problem.resized(size), maker)
        if order is None:
            return float("inf")
        values.append(order.value)
    slope = (values[1] - values[0]) / (sizes[1] - sizes[0])
    return values[1] + slope * (problem.microbatches - sizes[1])


def _made(problem: Problem, maker: Maker) -> Order | None:
    """The family's schedule in the search's form, or None where it does not exist or fit."""
    try:
        schedule = maker(problem.microbatches)
    except ScheduleError:
        return None
    # Not by `simulate`, whose timeline would cost more than all the rest.
    costs = problem.cost.on(problem.placement)
    for row, limit in zip(schedule.actions, problem.memory, strict=True):
        if _peak(row, costs) > limit * (1 + 1e-9):
            return None
    run = run_rows(schedule.actions, costs, problem.microbatches)
    if problem.objective == "span":
        value = max(e[-1] - s[0] for s, e in zip(run.starts, run.ends, strict=True))
    else:
        value = max(row[-1] for row in run.ends)
    return to_order(problem, schedule, value)


def _peak(row: Sequence[Action], costs: StageCosts) -> float:
    held = peak = 0.0
    for stage, op, _ in row:
        if op == Op.F:
            held += costs.activation[stage]
        elif op == Op.B:
            held -= costs.activation[stage]
        elif op == Op.I:
            held -= costs.freed_by_i[stage]
        else:
            held += costs.freed_by_i[stage] - costs.activation[stage]
        if held > peak:
            peak = held
    return peak
