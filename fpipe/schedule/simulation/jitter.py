"""Actions whose times vary, and the makespans of a schedule in trials of them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from random import Random
from typing import Final, TypeAlias

from fpipe.errors import ScheduleError
from fpipe.schedule.action import Action, Op
from fpipe.schedule.arguments import plain_number
from fpipe.schedule.simulation.clocks import run_rows
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
    """The makespan of each trial of rows that can run, by the rules of `clocks.run_rows`."""
    durations = [
        [array("d", _durations(action, rank, costs, sizes, draws)) for action in row]
        for rank, row in enumerate(rows)
    ]
    by_trial = (zip(*row, strict=True) if row else repeat((), draws.trials) for row in durations)
    makespans = []
    for times in zip(*by_trial, strict=True):
        run = run_rows(rows, costs, sizes, times)
        first = min((row[0] for row in run.starts if row), default=0.0)
        makespans.append(max((max(row) for row in run.ends if row), default=0.0) - first)
    return makespans


def _durations(
    action: Action, rank: int, costs: StageCosts, sizes: Sequence[float], draws: Draws
) -> Vector:
    """How long an action takes in each trial."""
    stage, op, microbatch = action
    usual = 0.0 if op == Op.RESHARD else getattr(costs, op.lower())[stage]  # which bear its name
    if microbatch is not None:
        usual *= sizes[microbatch]
    if not usual:
        return [0.0] * draws.trials
    factors, stalls = draws.factors(action, rank)
    return [usual * factor + stall for factor, stall in zip(factors, stalls, strict=True)]
