"""The greatest lower bound on the makespan or the span, for a placement, a cost and a memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final, Literal, TypeAlias

from fpipe.errors import ScheduleError
from fpipe.schedule.arguments import (
    MOST,
    check_ordered,
    is_several,
    plain_counts,
    plain_integer,
    plain_number,
)
from fpipe.schedule.bounds.decision_diagram import scarce_bound
from fpipe.schedule.bounds.formulas import (
    RankProblem,
    area_bound,
    area_of,
    idle_bound,
    message_bound,
    turns_bound,
    with_whole_stage_work,
)
from fpipe.schedule.bounds.propagation import refuted_bound
from fpipe.schedule.cost import Cost, check_cost
from fpipe.schedule.placements import plain_placement, stages_by_rank
from fpipe.schedule.scaled_costs import alike, with_times
from fpipe.schedule.stage_costs import StageCosts

# Where microbatches differ: how many bounds are taken, and how many sizes are distinguished.
_COUNTS: Final = 16
_SIZES: Final = 256

Objective: TypeAlias = Literal["makespan", "span"]
Memory: TypeAlias = float | Iterable[float] | None


def lower_bound(
    placement: Sequence[int],
    microbatches: int,
    cost: Cost,
    memory: Memory = None,
    *,
    objective: Objective = "makespan",
    effort: int = 2_000,
) -> float:
    """A time below which no schedule of this placement can finish, split backward or not.

    The greatest of six bounds. Four are formulas for each rank, with every other rank unlimited:

    - *start*: before the first gradient comes back to a rank, the rank can run only as many
      forwards as its memory holds;
    - *end*: after its last input gradient the rank can run only the weight gradients whose
      activations it still holds, while the gradient travels on to stage 0; and after its last
      forward, only the backwards of what it holds, while that forward makes its round trip. Start
      and end, plus all work in between, add up;
    - *area*: each microbatch holds its activation for at least one round trip, and memory times
      time must have room for all of them (see `area_bound`);
    - *turns*: where memory holds K microbatches, number K waits for a whole round trip of number 0,
      and so on to the last (see `turns_bound`).

    The fifth is for scarce memory, which leaves so few schedules that one can try them all:

    - *states*: the best schedule of one rank, or of a few together, with the others unlimited; or
      a time below it where there are too many states (see `bounds.decision_diagram`).

    The sixth, for makespans, looks at all ranks together:

    - *refutation*: in so little time some action would find no room, by what it waits for, the one
      action at a time of each rank, and memory (see `bounds.propagation`).

    Valid for every cost; tight where one rank limits the pipeline (ZB-H1 and unsplit schedules
    without latency meet it), and the best there is where *states* gets through all ranks exactly;
    loose by some percent where many ranks take turns. Where microbatches differ (``cost.sizes``) it
    is the greatest of that for the largest alone, for the two largest as if both were as small as
    the second, and so on, of the work of the busiest rank, and of what it holds for how long.

    Where the cost has times of whole-stage work, schedules do it: the bound counts the gathering
    before the first action, and the reduction and the update behind the last gradient. Where an F
    and a B run together, all times are taken to be the share of them that such a pair takes. Where
    transfers take any time, all bounds count those of one microbatch after the other, and one more
    counts all messages of a link; where sends occupy their rank, another counts those of a rank.

    Args:
        placement: the rank of each stage.
        microbatches: number of microbatches, at least 1.
        cost: times, latencies and activations.
        memory: the most activations a rank may hold, in the unit of ``cost.activation``: a number,
            one per rank, or None for no limit.
        objective: "makespan", or "span": the longest time from the first start to the last end
            of one rank.
        effort: about how many states to visit, some 30 microseconds each; fewer where they turn out
            to be too many. The refutation of makespans may take as long again, and where sizes
            differ a third time. With 0 the bound is that of the formulas.

    Returns:
        The bound, in the cost's unit of time.

    Raises:
        ScheduleError: an argument is out of range, or `memory` admits no schedule.

    Example:
        >>> from fpipe import Cost, lower_bound
        >>> lower_bound([0, 1, 2, 3], 8, Cost(f=1, i=1, w=1))  # ZB-H1 takes 27, ZB-H2 24 + 3
        27.0
        >>> lower_bound([0, 1, 2, 3], 8, Cost(f=1, i=1, w=1), memory=2)
        41.0
    """
    if objective not in ("makespan", "span"):
        raise ScheduleError(f"objective={objective!r:.60} must be 'makespan' or 'span'")
    (microbatches,) = plain_counts(microbatches=microbatches)
    check_cost(cost)
    placement = plain_placement(placement)
    states = plain_integer(effort)
    if states is None or states < 0:
        raise ScheduleError(f"effort={effort!r:.60} must be an integer, 0 or more")
    if cost.pair is not None:
        # All that runs together might as well run one after the other, in this share of its time.
        # Both send at its end, at once.
        cost = replace(with_times(cost, cost.pair), pair=None, blocking=False)
    span = objective == "span"
    if cost.sizes is not None or cost.memory_sizes is not None:
        both = zip(cost.sizes_of(microbatches), cost.memory_sizes_of(microbatches), strict=True)
        sizes = sorted(both, reverse=True)
        amounts = list(accumulate((amount for _, amount in sizes), min))
        if isinstance(memory, Iterator):
            memory = tuple(memory)  # it is read for each bound
        largest = alike(cost, sizes[0][0], max(amount for _, amount in sizes))
        limits = memory_limits(memory, placement, largest.on(placement))
        # No schedule is slower with microbatches left out, or made smaller.
        counts = [n for n in range(1, microbatches) if sizes[n - 1] > sizes[n]]
        counts = [*counts[:: -(-len(counts) // _COUNTS) or 1], microbatches]
        bounds = [
            lower_bound(
                placement,
                count,
                alike(cost, sizes[count - 1][0], amounts[count - 1]),
                memory,
                objective=objective,
                effort=states // len(counts),
            )
            for count in counts
        ]
        best = max(*bounds, _uneven_bound(placement, cost, sizes, limits, span))
        if span or not states:
            return best
        costs, (times, held) = cost.on(placement), zip(*sizes, strict=True)
        return refuted_bound(costs, placement, limits, times, held, best=best, effort=states)
    costs = cost.on(placement)
    limits = memory_limits(memory, placement, costs)
    best = _even_bound(costs, placement, microbatches, limits, span, states)
    stages_of = stages_by_rank(placement)
    if not span:
        best = max(best, message_bound(costs, stages_of, microbatches, microbatches))
    return with_whole_stage_work(best, costs, stages_of, microbatches, span)


def _even_bound(
    costs: StageCosts,
    placement: Sequence[int],
    microbatches: int,
    limits: Sequence[float],
    span: bool,
    states: int,
) -> float:
    """The bound of microbatches that are alike, without whole-stage work."""
    best, likely = 0.0, placement[0]
    scarce = False
    for rank, (limit, stages) in enumerate(zip(limits, stages_by_rank(placement), strict=True)):
        if stages:
            problem = RankProblem(costs, stages, microbatches, limit)
            bound = max(rule(problem, span) for rule in (idle_bound, area_bound, turns_bound))
            held = microbatches * sum(costs.activation[stage] for stage in stages)
            scarce = scarce or held > limit * (1 + 1e-9)
            if bound > best:
                best, likely = bound, rank
    if scarce and states:
        bound = scarce_bound(
            costs, placement, microbatches, limits, span=span, likely=likely, effort=states
        )
        best = max(best, bound)
    if span or not states:
        return best
    alike = (1.0,) * microbatches
    return refuted_bound(costs, placement, limits, alike, alike, best=best, effort=states)


def memory_limits(memory: Memory, placement: Sequence[int], costs: StageCosts) -> tuple[float, ...]:
    """`memory` as one limit per rank, checked to admit a schedule.

    Raises:
        ScheduleError: a limit is no number, their count is wrong, or a rank cannot hold one
            microbatch of all its stages, which is the least that any schedule needs.
    """
    ranks = max(placement) + 1
    if memory is None:
        return (float("inf"),) * ranks
    check_ordered("memory", memory, "rank", "one number")
    limits = tuple(memory) if is_several(memory) else (memory,) * ranks
    if len(limits) != ranks:
        raise ScheduleError(
            f"memory has {len(limits)} values for {ranks} ranks: give one per rank, or one number"
        )
    checked = []
    for rank, (value, stages) in enumerate(zip(limits, stages_by_rank(placement), strict=True)):
        limit = plain_number(value)
        least = sum(costs.activation[stage] for stage in stages)
        # A rank that keeps nothing, or has no stage, can do with no memory.
        if limit is None or not (limit > 0 or limit == least == 0):
            raise ScheduleError(f"memory={value!r:.60} of rank {rank} must be a number above 0")
        if limit < least * (1 - 1e-9):
            raise ScheduleError(
                f"memory={limit:g} of rank {rank} admits no schedule: the first backward needs one "
                f"microbatch of all its stages {list(stages)}, which is {least:g}; give at least "
                "that, or place fewer stages on the rank"
            )
        checked.append(limit if limit <= MOST * MOST else float("inf"))
    return tuple(checked)


def _uneven_bound(
    placement: Sequence[int],
    cost: Cost,
    sizes: Sequence[tuple[float, float]],
    limits: Sequence[float],
    span: bool,
) -> float:
    """The bound of each rank by its work, by the area of its activations, and by messages.

    `cost` is of a microbatch of size 1; `sizes` are those of times, falling, and of memory of all
    microbatches.
    """
    shortest, smallest = sizes[-1][0], min(amount for _, amount in sizes)
    costs, least = cost.on(placement), alike(cost, shortest, smallest).on(placement)
    starts, _ = least.earliest
    step = -(-len(sizes) // _SIZES)  # the least of so many stands for all
    groups: Counter[tuple[float, float]] = Counter()
    for at in range(0, len(sizes), step):
        group = sizes[at : at + step]
        groups[group[-1][0], min(amount for _, amount in group)] += len(group)
    by_size = [(alike(cost, *size).on(placement), count) for size, count in groups.items()]
    best, total, stages_of = 0.0, sum(size for size, _ in sizes), stages_by_rank(placement)
    for stages, limit in zip(stages_of, limits, strict=True):
        if stages:
            work = total * sum(costs.work[stage] for stage in stages)
            if limit < float("inf"):
                area = sum(count * area_of(each, stages) for each, count in by_size)
                work = max(work, area / limit if area else 0.0)
            best = max(best, (0.0 if span else starts[stages[0]]) + work)
    if not span:
        messages = sum(amount for _, amount in sizes) / smallest
        best = max(best, message_bound(least, stages_of, total / shortest, messages))
    return best
