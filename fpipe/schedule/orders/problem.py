"""The problem of a search, one placement with costs and limits, and orders that solve it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

from fpipe.schedule.action import Action, Op
from fpipe.schedule.bounds.makespan import Memory, Objective, lower_bound, memory_limits
from fpipe.schedule.bounds.states import GRADIENT, WEIGHT
from fpipe.schedule.cost import Cost
from fpipe.schedule.placements import stages_by_rank
from fpipe.schedule.scaled_costs import alike
from fpipe.schedule.schedule import Schedule
from fpipe.schedule.simulation.clocks import run_rows
from fpipe.schedule.stage_costs import StageCosts
from fpipe.schedule.whole_stage import whole_stage_rows

# In an `Order`, the quick form of a schedule that the search uses, an action is the number
# (stage * 3 + kind) * microbatches + microbatch, with kind FORWARD, GRADIENT or WEIGHT; GRADIENT is
# I, or B where it is fused with W.

LARGE = 12_000  # actions: what is larger is tuned on fewer microbatches


@dataclass(frozen=True)
class Problem:
    """One placement to search.

    Attributes:
        placement: the rank of each stage.
        microbatches: their number.
        cost: the cost of the user, without sizes where all are one.
        costs: the same per stage.
        memory: the limit of each rank.
        objective: "makespan" or "span".
        bound: a lower bound; by formulas alone, unless `examined`.
        stages: the stages of each rank.
        work: the busiest rank's work on one microbatch, of the mean size where they differ.
        sizes: of the microbatches; times are multiplied by them.
        amounts: by which their activations and messages are multiplied.
        turn: the default order in which stages take the microbatches.
    """

    placement: tuple[int, ...]
    microbatches: int
    cost: Cost
    costs: StageCosts
    memory: tuple[float, ...]
    objective: Objective
    bound: float
    stages: tuple[tuple[int, ...], ...]
    work: float
    sizes: tuple[float, ...]
    amounts: tuple[float, ...]
    turn: tuple[int, ...]

    @cached_property
    def uneven(self) -> bool:
        """Whether microbatches differ in size, so that it matters which comes when."""
        return len(set(self.sizes)) > 1 or len(set(self.amounts)) > 1

    def parts(self, action: int) -> tuple[int, int, int]:
        """The stage, kind and microbatch of the number of an action."""
        rest, microbatch = divmod(action, self.microbatches)
        return *divmod(rest, 3), microbatch

    @cached_property
    def mean_time(self) -> float:
        """The mean time of an action."""
        costs = self.costs
        total = sum(map(sum, (costs.f, costs.i, costs.w))) * sum(self.sizes)
        return total / self.actions

    @property
    def actions(self) -> int:
        """The number of F, I and W."""
        return 3 * len(self.placement) * self.microbatches

    @property
    def scale(self) -> float:
        """The size in multiples of `LARGE`, at least 1: the cost of a step grows with it."""
        return max(1.0, self.actions / LARGE)

    @property
    def slack(self) -> float:
        """A difference of times that may be rounding, in the unit of the costs."""
        return 1e-9 * self.work

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.stages)

    @cached_property
    def grows(self) -> bool:
        """Whether an I leaves W more memory than it frees, which a full backward does not."""
        return min(self.costs.freed_by_i) < 0

    @cached_property
    def fuses(self) -> bool:
        """Whether a full backward differs from I and W, in time or in memory."""
        costs = self.costs
        return (
            self.grows
            or costs.pair is not None
            or any(
                abs(b - i - w) > 1e-9 * b for b, i, w in zip(costs.b, costs.i, costs.w, strict=True)
            )
        )

    def played(self, order: Order) -> Order:
        """An order with the value of its schedule, in which whole-stage actions stand as well."""
        rows = whole_stage_rows(self.placement, to_rows(self, order), self.microbatches, self.cost)
        return replace(order, value=self.value_of(rows))

    @property
    def simulated(self) -> bool:
        """Whether the value of an order is that of its simulation, which no phase knows by itself:
        with whole-stage work, or where an F and a B run together, ranks share a link or wait while
        they send."""
        return self.cost.has_whole_stage or self.costs.entangled

    def value_of(self, rows: Sequence[Sequence[Action]]) -> float:
        """The makespan or the span of rows that can run."""
        run = run_rows(rows, self.costs, self.sizes)
        ends = [max(row, default=0.0) for row in run.ends]
        if self.objective == "span":
            return max(end - row[0] for row, end in zip(run.starts, ends, strict=True))
        return max(ends)

    def solved(self, value: float) -> bool:
        """Whether nothing can be better than `value`."""
        return value <= self.bound * (1 + 1e-9)

    def resized(self, microbatches: int) -> Problem:
        """The same with another number of microbatches, of the mean size where they differ."""
        if microbatches == self.microbatches:
            return self
        cost = self.cost_of(microbatches)
        other = replace(
            self,
            microbatches=microbatches,
            cost=cost,
            costs=cost.on(self.placement),
            sizes=(1.0,) * microbatches,
            amounts=(1.0,) * microbatches,
            turn=tuple(range(microbatches)),
            bound=0.0,
        )
        return other.examined(effort=0)

    def cost_of(self, microbatches: int) -> Cost:
        """The cost; of another number of microbatches those of the mean size where they differ."""
        if microbatches == self.microbatches or not self.uneven:
            return self.cost
        return alike(self.cost, fmean(self.sizes), fmean(self.amounts))

    def examined(self, effort: int) -> Problem:
        """The same with the best bound for this effort (see `lower_bound`)."""
        bound = lower_bound(
            self.placement,
            self.microbatches,
            self.cost,
            self.memory,
            objective=self.objective,
            effort=effort,
        )
        return replace(self, bound=max(self.bound, bound))


@dataclass(frozen=True)
class Order:
    """A schedule as rows of action numbers.

    Attributes:
        value: its makespan or span.
        rows: per rank, the numbers of its actions.
        fused: the gradients that are B, and have no W.
    """

    value: float
    rows: list[list[int]]
    fused: frozenset[int]


class Candidate(NamedTuple):
    """An order that solves a problem."""

    problem: Problem
    order: Order

    @property
    def value(self) -> float:
        """The value of the order."""
        return self.order.value


def make_problem(
    placement: Sequence[int],
    microbatches: int,
    cost: Cost,
    memory: Memory,
    objective: Objective,
) -> Problem:
    """Check the arguments and compute what the search needs all the time.

    Raises:
        ScheduleError: the cost does not fit the placement, or the memory admits no schedule.
    """
    sizes, amounts = cost.sizes_of(microbatches), cost.memory_sizes_of(microbatches)
    if len(set(zip(sizes, amounts, strict=True))) == 1:
        cost = alike(cost, sizes[0], amounts[0])
        sizes = amounts = (1.0,) * microbatches
    costs = cost.on(placement)
    largest = alike(cost, max(sizes), max(amounts))
    limits = memory_limits(memory, placement, largest.on(placement))
    stages = stages_by_rank(placement)
    work = max(sum(costs.work[stage] for stage in row) for row in stages)
    problem = Problem(
        placement=tuple(placement),
        microbatches=microbatches,
        cost=cost,
        costs=costs,
        memory=limits,
        objective=objective,
        bound=0.0,
        stages=stages,
        work=work * sum(sizes) / microbatches,
        sizes=sizes,
        amounts=amounts,
        turn=tuple(range(microbatches)),
    )
    return problem.examined(effort=0)


def to_schedule(problem: Problem, order: Order, name: str) -> Schedule:
    """The schedule of an order, without whole-stage actions."""
    return Schedule(problem.placement, to_rows(problem, order), name=name)


def to_rows(problem: Problem, order: Order) -> list[list[Action]]:
    """The actions of an order, rank by rank."""
    plain, fused = (Op.F, Op.I, Op.W), order.fused
    rows = []
    for row in order.rows:
        actions = []
        for number in row:
            stage, kind, microbatch = problem.parts(number)
            op = Op.B if number in fused else plain[kind]
            actions.append(Action(stage, op, microbatch))
        rows.append(actions)
    return rows


def to_order(problem: Problem, schedule: Schedule, value: float = math.inf) -> Order:
    """The order of a schedule of this value. B's become I and W where that costs nothing."""
    rows: list[list[int]] = []
    fused = set()
    for actions in schedule.actions:
        row: list[int] = []
        for stage, op, microbatch in actions:
            if microbatch is None:
                continue
            base = stage * 3 * problem.microbatches + microbatch
            gradient = base + GRADIENT * problem.microbatches
            if op == Op.F:
                row.append(base)
            elif op == Op.W:
                row.append(base + WEIGHT * problem.microbatches)
            else:
                row.append(gradient)
                if op == Op.B and problem.fuses:
                    fused.add(gradient)
                elif op == Op.B:
                    row.append(base + WEIGHT * problem.microbatches)
        rows.append(row)
    return Order(value, rows, frozenset(fused))


def by_size(sizes: Sequence[float], turn: Sequence[int]) -> Iterator[list[int]]:
    """Microbatches by size: rising, falling, the long or the short inside; equal ones in turn."""
    rising = sorted(turn, key=sizes.__getitem__)
    falling = rising[::-1]
    yield rising
    yield falling
    yield [*rising[::2], *rising[1::2][::-1]]
    yield [*falling[::2], *falling[1::2][::-1]]
    # The longest in the second half, the shortest around.
    quarter = len(rising) // 4
    yield [*rising[:quarter], *rising[2 * quarter :], *rising[quarter : 2 * quarter]]


def rename_microbatches(problem: Problem, order: Order, names: dict[int, int]) -> Order:
    """An order with other microbatches in the places of some, and no value yet."""
    count = problem.microbatches
    renamed = [names.get(microbatch, microbatch) for microbatch in range(count)]
    kinds = range(0, 3 * len(problem.placement) * count, count)
    table = [first + other for first in kinds for other in renamed]
    rows = [[table[action] for action in row] for row in order.rows]
    return Order(float("inf"), rows, frozenset(table[action] for action in order.fused))
