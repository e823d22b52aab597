"""Breeding: policies of the list scheduler are drawn at random, and the best are mutated."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final, NamedTuple

from fpipe.schedule.searching.list_scheduler import (
    Policy,
    known_policies,
    list_schedule,
    mutated,
    random_policy,
)
from fpipe.schedule.searching.portfolio import Phase, Standing, Step
from fpipe.schedule.searching.problem import LARGE, Candidate, Order, Problem

_KEPT: Final = 8


class Bred(NamedTuple):
    """A policy, and the order that it makes of a problem."""

    problem: Problem
    policy: Policy
    order: Order


def breeding(problems: Sequence[Problem], standing: Standing, random: Random) -> Phase:
    """Play the known policies on each placement, then random ones and mutants in turn.

    A child takes its parent's place if it is no worse. Policies of large problems are compared on
    fewer microbatches, and the best is played in full from time to time.

    Args:
        problems: one per placement.
        standing: what is known already.
        random: of all choices.
    """
    full = {problem.placement: problem for problem in problems}
    small = reduced(problems)
    large = small[0].microbatches < problems[0].microbatches
    bred: list[Bred] = []
    tried: set[int] = set()  # what was played in full, by identity
    plays, since, draws = 0, 0.0, 0
    while True:
        plays += 1
        open_to = [problem for problem in small if not standing.hopeless(full[problem.placement])]
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
            stop = standing.value if whole.objective == "makespan" else float("inf")
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
