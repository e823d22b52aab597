"""The search for a schedule that is fast on average where times vary."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from random import Random
from typing import Final

from fpipe.schedule.action import Action, Op
from fpipe.schedule.orders.evaluator import Evaluator, make_evaluator
from fpipe.schedule.orders.problem import LARGE, Candidate, Problem
from fpipe.schedule.phases.annealing import anneal
from fpipe.schedule.phases.portfolio import Entry, Incumbents, Meter, Phase, Step, run
from fpipe.schedule.phases.seeds import seeds
from fpipe.schedule.schedule import Schedule
from fpipe.schedule.simulation.jitter import Draws, Jitter, trial_makespans

TRIALS: Final = 200  # of a result
_TRIALS: Final = 16  # of each order that is looked at
_FEW: Final = 20  # of schedules of equal makespans
_WORK: Final = 100_000  # actions of all trials together, in the comparison of those
_CLOSE: Final = 1.01  # how much longer the mean of an order may be that is looked at once more
_MOST: Final = 400_000  # actions of the trials of one of them
_FINAL: Final = 8  # orders of those
_MOVES: Final = 400  # of the first annealing
_HEATS: Final = (0.1, 0.3, 0.6)


class MeanEvaluator:
    """An evaluator whose value of an order is the mean of its makespans over a few trials."""

    def __init__(self, usual: Evaluator, jitter: Jitter, seed: int) -> None:
        self.problem, self._usual = usual.problem, usual
        self.fits, self.fits_all, self.critical = usual.fits, usual.fits_all, usual.critical
        draws = Draws(jitter, _TRIALS, seed)
        rates: list[list[float]] = [[] for _ in range(_TRIALS)]
        times: list[list[float]] = [[] for _ in range(_TRIALS)]
        problem = self.problem
        for number in range(problem.actions):
            stage, kind, microbatch = problem.parts(number)
            action = Action(stage, (Op.F, Op.I, Op.W)[kind], microbatch)
            factors, stalls = draws.factors(action, problem.placement[stage])
            time = usual.duration[number]
            for trial in range(_TRIALS):
                rates[trial].append(factors[trial])
                times[trial].append(time * factors[trial] + (stalls[trial] if time else 0.0))
        rest = usual.duration[problem.actions :]  # whole-stage work
        self._scenarios = [
            replace(usual, duration=[*times[trial], *rest], rates=rates[trial])
            for trial in range(_TRIALS)
        ]

    def times(
        self, rows: list[list[int]], fused: AbstractSet[int], limit: float = math.inf
    ) -> tuple[float, list[float]]:
        """The mean makespan, and the end of each action where times do not vary."""
        value, ends = self._usual.times(rows, fused, limit)
        if value > limit or value == math.inf:  # a mean is not below it
            return math.inf, ends
        most = limit * _TRIALS
        total = 0.0
        for scenario in self._scenarios:
            total += scenario.times(rows, fused)[0]
            if total > most:
                return math.inf, ends
        return total / _TRIALS, ends


def means(
    evaluators: Mapping[tuple[int, ...], MeanEvaluator],
    pool: Sequence[Candidate],
    incumbents: Incumbents,
    random: Random,
) -> Phase:
    """Candidates with their means, and then better ones, by annealing from the best."""
    seen: set[int] = set()
    for problem, order in pool:
        if id(order) not in seen:
            seen.add(id(order))
            value, _ = evaluators[problem.placement].times(order.rows, order.fused)
            yield Step(_TRIALS * 0.1, Candidate(problem, replace(order, value=value)))
    nth = 0
    while True:
        few = incumbents.candidates
        problem, order = few[0 if nth % 2 == 0 else min(int(random.expovariate(0.5)), len(few) - 1)]
        heat = random.choice(_HEATS) * math.sqrt(min(1.0, 150 / problem.actions))
        for step in anneal(
            evaluators[problem.placement], order, random, _MOVES * (1 + nth // 4), heat
        ):
            yield step._replace(cost=step.cost * _TRIALS * 0.5)
        nth += 1


def find_robust(
    problems: Sequence[Problem],
    fast: Incumbents,
    meter: Meter,
    schedule_of: Callable[[Candidate], Schedule],
    jitter: Jitter,
    seed: int,
) -> Candidate:
    """The candidate with the least mean makespan."""
    pool = [*fast.candidates, *fast.ties]
    if all(problem.actions <= LARGE for problem in problems):
        pool += [step.candidate for step in seeds(problems) if step.candidate is not None]
        evaluators = {
            problem.placement: MeanEvaluator(make_evaluator(problem), jitter, seed)
            for problem in problems
        }
        incumbents = Incumbents(bounds=fast.bounds)
        random = Random(f"{seed} robust")
        run([Entry(1.0, means(evaluators, pool, incumbents, random))], incumbents, meter)
        pool = incumbents.candidates
        best = incumbents.value
        pool = [each for each in pool if each.value <= _CLOSE * best]
    trials = max(1, min(TRIALS, _MOST // pool[0].problem.actions))
    return min(
        pool[:_FINAL],
        key=lambda each: mean_of(each.problem, schedule_of(each), jitter, trials),
    )


def steadiest(
    ties: Sequence[Candidate], schedule_of: Callable[[Candidate], Schedule], jitter: Jitter
) -> Candidate:
    """The candidate with the least mean among those of one makespan; the first if it takes long."""
    few = [each for each in ties if each.problem.actions * len(ties) * _FEW <= _WORK]
    if len(few) < 2:
        return ties[0]
    return min(few, key=lambda each: mean_of(each.problem, schedule_of(each), jitter, _FEW))


def mean_of(problem: Problem, schedule: Schedule, jitter: Jitter, trials: int) -> float:
    """The mean makespan of a schedule."""
    draws = Draws(jitter, trials, seed=0)
    values = trial_makespans(schedule.actions, problem.costs, problem.sizes, draws)
    return math.fsum(values) / trials
