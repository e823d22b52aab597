"""Actions whose times vary: many trials of a schedule in one pass, each action's as a vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add
from random import Random
from typing import Final, TypeAlias

from fpipe.errors import ScheduleError
from fpipe.schedule.action import Action, Op
from fpipe.schedule.arguments import plain_integer, plain_number
from fpipe.schedule.dependencies import dependencies
from fpipe.schedule.simulation.clocks import run_rows
from fpipe.schedule.simulation.link_queues import Link
from fpipe.schedule.stage_costs import StageCosts

Vector: TypeAlias = list[float]  # a number for each trial

# B is drawn as I is: the same schedule with other backwards then meets the same luck.
_DRAWN_AS: Final = {Op.B: Op.I}


@dataclass(frozen=True)
class Jitter:
    """How the times of actions vary from step to step.

    The time of an action in a trial is its time by the cost, times a log-normal factor of its own,
    times one of its rank in that trial, and perhaps a stall on top. On average over the trials the
    factors of each action are exactly 1, so a mean makespan is never below the makespan without
    jitter, nor below a lower bound. Latencies and transfers do not vary.

    Attributes:
        each: standard deviation of the factor of each action: 0.05 is five percent.
        rank: that of the factor that all actions of a rank share in a trial.
        stalls: the chance of an action to stall.
        stall: for how long, in the unit of the cost.

    Raises:
        ScheduleError: a value is not finite or negative, or `stalls` is more than 1.

    Example:
        >>> import fpipe
        >>> zb = fpipe.schedules.zb_h1(ranks=4, microbatches=8)
        >>> plain = fpipe.simulate(zb, fpipe.Cost(f=1, i=1, w=1))
        >>> shaken = fpipe.simulate(zb, plain.cost, jitter=fpipe.Jitter(each=0.05), trials=100)
        >>> plain.makespan == shaken.makespan, 27 < shaken.mean < 28.5, 0 < shaken.spread < 1
        (True, True, True)
    """

    each: float = 0.0
    rank: float = 0.0
    stalls: float = 0.0
    stall: float = 0.0

    def __post_init__(self) -> None:
        for name in ("each", "rank", "stalls", "stall"):
            value = plain_number(getattr(self, name))
            if value is None or not 0 <= value < math.inf or (name == "stalls" and value > 1):
                rule = "from 0 to 1" if name == "stalls" else "a finite number, at least 0"
                raise ScheduleError(f"jitter {name}={getattr(self, name)!r:.60} must be {rule}")
            object.__setattr__(self, name, value)


def plain_jitter(jitter: Jitter | float) -> Jitter:
    """A number as the jitter of each action."""
    return jitter if isinstance(jitter, Jitter) else Jitter(each=jitter)


def plain_trials(trials: int, seed: int) -> tuple[int, int]:
    """The numbers of trials and of a seed, checked."""
    count, number = plain_integer(trials), plain_integer(seed)
    if count is None or count < 1:
        raise ScheduleError(f"trials={trials!r:.60} must be an integer, 1 or more")
    if number is None:
        raise ScheduleError(f"seed={seed!r:.60} must be an integer")
    return count, number


class Draws:
    """The factors of each action in each trial, whatever the order of the actions."""

    def __init__(self, jitter: Jitter, trials: int, seed: int) -> None:
        self.jitter, self.trials, self.seed = jitter, trials, seed
        self._ranks: dict[int, Vector] = {}

    def factors(self, action: Action, rank: int) -> tuple[Vector, Vector]:
        """The factors of an action's time, 1 on average, and what stalls add to it."""
        jitter, trials = self.jitter, self.trials
        stage, op, microbatch = action
        random = Random(f"{self.seed} {stage} {_DRAWN_AS.get(op, op)} {microbatch}")
        factors = _lognormal(random, jitter.each, trials)
        if jitter.rank:
            if rank not in self._ranks:
                numbers = Random(f"{self.seed} rank {rank}")
                self._ranks[rank] = _lognormal(numbers, jitter.rank, trials)
            factors = [a * b for a, b in zip(factors, self._ranks[rank], strict=True)]
        mean = math.fsum(factors) / trials
        stalls = [0.0] * trials
        if jitter.stalls and jitter.stall:
            stalls = [jitter.stall * (random.random() < jitter.stalls) for _ in range(trials)]
        return [factor / mean for factor in factors], stalls


def _lognormal(random: Random, deviation: float, trials: int) -> Vector:
    if not deviation:
        return [1.0] * trials
    sigma = math.sqrt(math.log1p(deviation * deviation))
    return [math.exp(sigma * random.gauss(0.0, 1.0)) for _ in range(trials)]


def trial_makespans(
    rows: Sequence[Sequence[Action]], costs: StageCosts, sizes: Sequence[float], draws: Draws
) -> Vector:
    """The makespan of each trial of rows that can run, by the rules of `clocks.run_rows`.

    The same actions run together in all trials.
    """
    if costs.shared:
        # The order of messages on a link differs from trial to trial.
        return _one_by_one(rows, costs, sizes, draws)
    graph = dependencies(rows)
    paired: set[int] = set()  # F's that run together with the B behind them
    if costs.pair is not None:
        needs = list(graph.needs)
        for rank, at in run_rows(rows, costs, sizes).pairs:
            number = graph.starts[rank] + at
            paired.add(number)
            needs[number] += needs[number + 1]
        graph = replace(graph, needs=tuple(needs))
    zero = [0.0] * draws.trials
    amounts = costs.memory_sizes or (1,) * len(sizes)  # by which messages are multiplied
    clocks, lanes = [zero] * len(rows), [zero] * len(rows)
    gathered, reduced = [zero] * len(costs.f), [zero] * len(costs.f)
    free: dict[int, Vector] = {}  # by link
    forward: dict[tuple[int, int], Vector] = {}  # arrivals at the reader, by maker
    backward: dict[tuple[int, int], Vector] = {}
    halved: set[tuple[int, int]] = set()  # that have had their I
    together: dict[int, tuple[Vector, Vector]] = {}  # start and end of B's that do
    last, first = zero, [math.inf] * draws.trials

    def send(ready: Vector, link: Link | None, least: float, size: float, rank: int) -> Vector:
        """When a message arrives; its rank is occupied meanwhile where sends are blocking."""
        if link is None or not link.transfer:
            return [end + least for end in ready]
        end = _latest(ready, free.get(link.number, zero))
        free[link.number] = end = [each + link.transfer * size for each in end]
        if costs.blocking:
            clocks[rank] = _latest(clocks[rank], end)
        return [each + link.latency for each in end]

    def gradient(stage: int, microbatch: int) -> Vector:
        """The arrival of what a backward reads."""
        return backward.pop((stage + 1, microbatch)) if stage + 1 < len(costs.f) else zero

    for number in graph.run_order():
        stage, op, microbatch = action = graph.actions[number]
        rank, _ = graph.place(number)
        now = clocks[rank]
        takes = _durations(action, rank, costs, sizes, draws)
        if microbatch is None:
            begin = now
            if op == Op.UPDATE:
                begin = _latest(now, reduced[stage])
            elif op == Op.UNSHARD:
                begin = _latest(now, lanes[rank])
            elif op == Op.REDUCE_GRAD:
                now = _latest(now, reduced[stage])
                begin = _latest(now, lanes[rank])
            end = list(map(add, begin, takes))
            if op == Op.UNSHARD:
                lanes[rank] = gathered[stage] = end
            elif op == Op.REDUCE_GRAD:
                lanes[rank] = reduced[stage] = end
            clocks[rank] = end if op == Op.UPDATE or not costs.collective_lane else now
        else:
            key = (stage, microbatch)
            begin = _latest(now, gathered[stage])
            if op == Op.F and stage:
                begin = _latest(begin, forward.pop((stage - 1, microbatch)))
            elif op != Op.F and key not in halved and number not in together:
                begin = _latest(begin, gradient(stage, microbatch))
            if op == Op.I:
                halved.add(key)
            if number in paired and costs.pair is not None:
                partner = graph.actions[number + 1]
                assert partner.microbatch is not None
                begin = _latest(begin, gathered[partner.stage])
                begin = _latest(begin, gradient(partner.stage, partner.microbatch))
                other = _durations(partner, rank, costs, sizes, draws)
                both = map(add, takes, other)
                takes = [costs.pair * time for time in both]
                together[number + 1] = begin, list(map(add, begin, takes))
            if number in together:
                begin, end = together.pop(number)
            else:
                end = list(map(add, begin, takes))
            clocks[rank] = _latest(now, end)  # a send of the partner's may last longer
            if op == Op.F and stage + 1 < len(costs.f):
                link = costs.down_links[stage] if costs.down_links else None
                forward[key] = send(end, link, costs.down[stage], amounts[microbatch], rank)
            elif stage and op in (Op.B, Op.I):
                link = costs.up_links[stage - 1] if costs.up_links else None
                backward[key] = send(end, link, costs.up[stage - 1], amounts[microbatch], rank)
        last = _latest(last, end)
        first = list(map(min, first, begin))
    return [end - start for end, start in zip(last, first, strict=True)] if graph.actions else zero


def _durations(
    action: Action, rank: int, costs: StageCosts, sizes: Sequence[float], draws: Draws
) -> Vector:
    """How long an action takes in each trial."""
    stage, op, microbatch = action
    times = {Op.F: costs.f, Op.I: costs.i, Op.W: costs.w, Op.B: costs.b}
    whole = {Op.UNSHARD: costs.unshard, Op.REDUCE_GRAD: costs.reduce_grad, Op.UPDATE: costs.update}
    usual = times[op][stage] * sizes[microbatch] if microbatch is not None else 0.0
    if op in whole:
        usual = whole[op][stage]
    if not usual:
        return [0.0] * draws.trials
    factors, stalls = draws.factors(action, rank)
    return [usual * factor + stall for factor, stall in zip(factors, stalls, strict=True)]


def _one_by_one(
    rows: Sequence[Sequence[Action]], costs: StageCosts, sizes: Sequence[float], draws: Draws
) -> Vector:
    """The makespan of each trial, one after the other."""
    durations = [
        [_durations(action, rank, costs, sizes, draws) for action in row]
        for rank, row in enumerate(rows)
    ]
    makespans = []
    for trial in range(draws.trials):
        run = run_rows(rows, costs, sizes, [[each[trial] for each in row] for row in durations])
        last = max((max(row) for row in run.ends if row), default=0.0)
        makespans.append(last - min((min(row) for row in run.starts if row), default=0.0))
    return makespans


def _latest(one: Vector, other: Vector) -> Vector:
    return list(map(max, one, other))
