"""Breeding: policies of the list scheduler are drawn at random, and the best are mutated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Final, NamedTuple

from fpipe.schedule.bounds.states import GRADIENT
from fpipe.schedule.orders.list_scheduler import (
    UNLIMITED,
    Policy,
    list_schedule,
    plain_policy,
)
from fpipe.schedule.orders.problem import LARGE, Candidate, Order, Problem, by_size
from fpipe.schedule.phases.portfolio import Incumbents, Phase, Step

_KEPT: Final = 8


class Bred(NamedTuple):
    """A policy, and the order that it makes of a problem."""

    problem: Problem
    policy: Policy
    order: Order


def breeding(problems: Sequence[Problem], incumbents: Incumbents, random: Random) -> Phase:
    """Play the known policies on each placement, then random ones and mutants in turn.

    A child takes its parent's place if it is no worse. Policies of large problems are compared on
    fewer microbatches, and the best is played in full from time to time.
    """
    full = {problem.placement: problem for problem in problems}
    small = reduced(problems)
    large = small[0].microbatches < problems[0].microbatches
    bred: list[Bred] = []
    tried: set[int] = set()  # what was played in full, by identity
    plays, since, draws = 0, 0.0, 0
    while True:
        plays += 1
        open_to = [problem for problem in small if not incumbents.hopeless(full[problem.placement])]
        if not open_to:
            return
        parent = None
        turn, at = divmod(draws, len(open_to))
        problem = open_to[at]
        known = known_policies(problem)
        if turn < len(known):
            policy, draws = known[turn], draws + 1
        elif plays % 2 or not bred:
            policy, draws = random_policy(random, problem), draws + 1
        else:
            parent = bred[min(int(random.expovariate(0.5)), len(bred) - 1)]
            problem = parent.problem
            policy = mutated(random, parent.policy, problem)
        limit = parent.order.value if parent and problem.objective == "makespan" else float("inf")
        order = list_schedule(problem, policy, limit * (1 + 1e-12))
        since += 1
        if order is None or (parent and order.value > parent.order.value):
            yield Step(1.0)
            continue
        child = Bred(problem, policy, order)
        bred = sorted(
            [*(each for each in bred if each is not parent), child],
            key=lambda each: each.order.value,
        )[:_KEPT]
        if not large:
            yield Step(1.0, Candidate(problem, order))
            continue
        yield Step(1.0)
        best, whole = bred[0], full[bred[0].problem.placement]
        # The first soon, so that there is something.
        wanted = whole.scale if tried else min(whole.scale, _KEPT)
        if since >= wanted and id(best.policy) not in tried:
            tried.add(id(best.policy))
            since = 0.0
            stop = incumbents.value if whole.objective == "makespan" else float("inf")
            played = list_schedule(whole, best.policy, stop)
            yield Step(whole.scale, None if played is None else Candidate(whole, played))


def reduced(problems: Sequence[Problem]) -> list[Problem]:
    """The problems with as many microbatches as keep the largest from being large, but at least two
    per rank. All have the same number, so that their values compare."""
    stages = max(len(problem.placement) for problem in problems)
    count, ranks = problems[0].microbatches, problems[0].ranks
    if 3 * stages * count > LARGE:
        count = min(count, max(2 * ranks, LARGE // (3 * stages)))
    return [problem.resized(count) for problem in problems]


def paced_policy(stages: int, pace: float) -> Policy:
    """Microbatches that come at a pace and go on at once, as in V-Min and V-Half, at any costs."""
    slope = [-0.5 * stage / stages for stage in range(stages)]
    forward, gradient, weight = (tuple(base + at for at in slope) for base in (1.0, 1.5, 0.5))
    return Policy((forward, gradient, weight), (UNLIMITED,) * stages, (0, 0.5, 0), pace=pace)


def turning_policy(stages: int, eager: int) -> Policy:
    """Microbatches that take turns in scarce memory: the first stages refill what is freed at once.

    There is one stage per rank. The `eager` first ones prefer F to I; the others hand gradients on
    first.
    """
    forward = tuple(3.0 if stage < eager else 1.0 for stage in range(stages))
    ranked = (forward, (2.0,) * stages, (0.0,) * stages)
    return Policy(ranked, (UNLIMITED,) * stages, (UNLIMITED, 0.3, UNLIMITED))


def known_policies(problem: Problem) -> list[Policy]:
    """The policies to try before random ones."""
    stages = len(problem.placement)
    known = [
        plain_policy(stages, eager=True),
        plain_policy(stages),
        plain_policy(stages, (1, 1, 1), eager=True),
        plain_policy(stages, (1, 1, 1)),
        *(paced_policy(stages, pace) for pace in (0.9, 1, 1.05, 1.1, 1.2, 1.3, 1.4)),
    ]
    if stages == problem.ranks:
        known += [turning_policy(stages, eager) for eager in range(min(stages, 8))]
    return known


def random_policy(random: Random, problem: Problem) -> Policy:
    """A policy from the shapes that are known to be of use."""
    stages = len(problem.placement)
    bases = random.choice([(1, 2, 0), (1, 2, 0), (2, 1, 0), (1, 1.5, 0.5)])
    # By stage: the depth of the pipeline first, or its beginning first, or neither.
    slopes = (
        random.choice([-2, -0.9, -0.5, 0, 0.5, 0.9, 2]),
        random.choice([-2, -0.9, -0.5, 0, 0.5, 0.9, 2]),
        random.choice([-0.5, 0, 0.5]),
    )

    def priority(kind: int) -> tuple[float, ...]:
        return tuple(bases[kind] + slopes[kind] * stage / stages for stage in range(stages))

    extra, steep = random.choice([0, 1, 2, 4, UNLIMITED]), random.choice([0.5, 1, 1.5, 2, 2.5])
    windows = tuple(max(1, round(steep * (stages - stage))) + extra for stage in range(stages))
    patience = [random.choice([0, 0, 0.5, 1, 2, UNLIMITED]) for _ in range(3)]
    pace = random.choice([0, 0, 0.8, 0.9, 1, 1, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4])
    return Policy(
        priorities=(priority(0), priority(1), priority(2)),
        windows=windows,
        patience=(patience[0], patience[1], patience[2]),
        pace=pace,
        bunch=random.choice([1, 1, 1, 2, 3, max(1, problem.ranks // 2), problem.ranks]),
        fused=problem.fuses and random.random() < 0.3,
        turn=_random_turn(random, problem) if problem.uneven else None,
    )


def _random_turn(random: Random, problem: Problem) -> tuple[int, ...]:
    """The default order, one by size, or any."""
    kind = random.randrange(4)
    if kind == 0:
        return problem.turn
    if kind == 1:
        return tuple(random.sample(problem.turn, len(problem.turn)))
    return tuple(random.choice(list(by_size(problem.sizes, problem.turn))))


def mutated(random: Random, policy: Policy, problem: Problem) -> Policy:
    """The policy with one to three of its numbers changed, or two microbatches in its turn."""
    if problem.uneven and random.random() < 0.5:
        turn = list(policy.turn or problem.turn)
        first, second = random.sample(range(len(turn)), 2)
        turn[first], turn[second] = turn[second], turn[first]
        return replace(policy, turn=tuple(turn))
    for _ in range(random.choice([1, 1, 2, 3])):
        policy = _changed(random, policy, problem)
    return policy


def _changed(random: Random, policy: Policy, problem: Problem) -> Policy:
    stage, draw = random.randrange(len(policy.windows)), random.random()
    if draw < 0.35:
        rows = [list(row) for row in policy.priorities]
        rows[random.randrange(3)][stage] += random.gauss(0, 1)
        forward, gradient, weight = map(tuple, rows)
        return replace(policy, priorities=(forward, gradient, weight))
    if draw < 0.75:
        windows = [min(window, problem.microbatches) for window in policy.windows]
        step = random.choice([-2, -1, 1, 2])
        for at in [stage] if draw < 0.6 else range(len(windows)):
            windows[at] = max(1, windows[at] + step)
        return replace(policy, windows=tuple(windows))
    if draw < 0.85:
        patience = list(policy.patience)
        patience[random.randrange(3)] = random.choice([0, 0.3, 0.5, 1, 2, UNLIMITED])
        return replace(policy, patience=(patience[0], patience[GRADIENT], patience[2]))
    if draw < 0.95:
        return replace(policy, pace=policy.pace * random.uniform(0.9, 1.1))
    return replace(policy, bunch=max(1, policy.bunch + random.choice([-1, 1])))
