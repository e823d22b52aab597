"""The candidates of a search, over all placements, and how they are bred."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from fpipe.schedule.searching.budget import Budget
from fpipe.schedule.searching.list_scheduler import list_schedule
from fpipe.schedule.searching.policy import Policy, known_policies, mutated, random_policy
from fpipe.schedule.searching.problem import Order, Problem

TUNED = 12_000  # actions: above it, policies are compared on fewer microbatches
_KEPT = 8


class Candidate(NamedTuple):
    """An order that solves a problem."""

    problem: Problem
    order: Order

    @property
    def value(self) -> float:
        """Of the order."""
        return self.order.value


class Bred(NamedTuple):
    """A policy, and the order that it makes of a problem."""

    problem: Problem
    policy: Policy
    order: Order


@dataclass(frozen=True)
class Breeder:
    """Breeds policies for one or several placements at a time.

    Attributes:
        problems: one per placement; those of `reduced` where they are large.
        random: of all choices.
        budget: what the breeding may use.
        best: the least value that is known without any policy.
    """

    problems: Sequence[Problem]
    random: Random
    budget: Budget
    best: float

    def draw(self) -> list[Bred]:
        """The best of random policies, each placement in turn, after the known ones."""
        bred: list[Bred] = []
        draws = 0
        while not self._done(bred):
            turn, at = divmod(draws, len(self.problems))
            problem = self.problems[at]
            known = known_policies(problem)
            policy = known[turn] if turn < len(known) else random_policy(self.random, problem)
            draws += 1
            if (order := self._play(problem, policy, float("inf"))) is not None:
                bred = _sorted([*bred, Bred(problem, policy, order)])
        return bred

    def mutate(self, bred: list[Bred]) -> list[Bred]:
        """The same after mutation: a child takes its parent's place if it is no worse."""
        while bred and not self._done(bred):
            at = min(int(self.random.expovariate(0.5)), len(bred) - 1)
            problem, parent, order = bred[at]
            policy = mutated(self.random, parent, problem)
            child = self._play(problem, policy, order.value)
            if child is not None and child.value <= order.value:
                bred = _sorted([*bred[:at], Bred(problem, policy, child), *bred[at + 1 :]])
        return bred

    def _play(self, problem: Problem, policy: Policy, limit: float) -> Order | None:
        self.budget.spend()
        if problem.objective == "span":
            limit = float("inf")
        return list_schedule(problem, policy, limit * (1 + 1e-12))

    def _done(self, bred: list[Bred]) -> bool:
        best = min(self.best, bred[0].order.value) if bred else self.best
        bound = min(problem.bound for problem in self.problems)
        return self.budget.over or best <= bound * (1 + 1e-9)


def reduced(problems: Sequence[Problem]) -> list[Problem]:
    """The problems with as many microbatches as keep the largest from being large, but at least two
    per rank. All have the same number, so that their values compare."""
    stages = max(len(problem.placement) for problem in problems)
    count, ranks = problems[0].microbatches, problems[0].ranks
    if 3 * stages * count > TUNED:
        count = min(count, max(2 * ranks, TUNED // (3 * stages)))
    return [problem.resized(count) for problem in problems]


def played_in_full(
    bred: list[Bred], problems: Sequence[Problem], limit: float
) -> Iterator[Candidate]:
    """What policies make of the problems of full size, where that is less than `limit`."""
    full = {problem.placement: problem for problem in problems}
    for small, policy, order in bred:
        problem = full[small.placement]
        if problem.microbatches != small.microbatches:
            stop = limit if problem.objective == "makespan" else float("inf")
            made = list_schedule(problem, policy, stop)
            if made is None:
                continue
            order = made
        limit = min(limit, order.value)
        yield Candidate(problem, order)


def _sorted(bred: list[Bred]) -> list[Bred]:
    return sorted(bred, key=lambda one: one.order.value)[:_KEPT]
