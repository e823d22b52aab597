"""Policies of the list scheduler: a few numbers per stage, drawn at random and mutated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from fpipe.schedule.bounds.steps import GRADIENT
from fpipe.schedule.searching.problem import Problem, by_size

UNLIMITED = float("inf")


@dataclass(frozen=True)
class Policy:
    """How a rank chooses what to run next.

    Attributes:
        priorities: of F, of I and of W, per stage; the highest that can run goes first.
        windows: per stage, the most microbatches between F and I.
        patience: of F, of I and of W: how readily they wait for something more urgent that is
            known to arrive before they would end. 0 never waits; at 1 a wait may be as long as the
            delay that it avoids.
        pace: the least time between the starts of microbatches, as a part of the busiest rank's
            work on one. Scarce memory goes further when the microbatches do not come in a bunch.
        bunch: microbatches that come together all the same, before a pause of as many paces:
            memory that is handed on in turns wants this.
        fused: run B, never I and W.
        turn: the microbatches in the order in which they are taken; None for the problem's.
    """

    priorities: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    windows: tuple[float, ...]
    patience: tuple[float, float, float]
    pace: float = 0.0
    bunch: int = 1
    fused: bool = False
    turn: tuple[int, ...] | None = None


def plain_policy(
    stages: int, patience: tuple[float, float, float] = (0, 0, 0), *, eager: bool = False
) -> Policy:
    """I before F, W where nothing else can run: 1F1B whose W's fill the gaps.

    Args:
        stages: number of stages.
        patience: as in `Policy`.
        eager: F before I instead, with 1F1B's limit on how far ahead a stage may be.
    """
    priorities = ((3.0 if eager else 1.0,) * stages, (2.0,) * stages, (0.0,) * stages)
    windows = tuple(float(stages - stage) if eager else UNLIMITED for stage in range(stages))
    return Policy(priorities, windows, patience)


def paced_policy(stages: int, pace: float) -> Policy:
    """Microbatches that come at a pace and go on at once, as in V-Min and V-Half, at any costs."""
    slope = [-0.5 * stage / stages for stage in range(stages)]
    forward, gradient, weight = (tuple(base + at for at in slope) for base in (1.0, 1.5, 0.5))
    return Policy((forward, gradient, weight), (UNLIMITED,) * stages, (0, 0.5, 0), pace=pace)


def turning_policy(stages: int, eager: int) -> Policy:
    """Microbatches that take turns in scarce memory: the first stages refill what is freed at once.

    Args:
        stages: number of stages, one per rank.
        eager: so many of the first stages prefer F to I; the others hand gradients on first.
    """
    forward = tuple(3.0 if stage < eager else 1.0 for stage in range(stages))
    ranked = (forward, (2.0,) * stages, (0.0,) * stages)
    return Policy(ranked, (UNLIMITED,) * stages, (UNLIMITED, 0.3, UNLIMITED))


def known_policies(problem: Problem) -> list[Policy]:
    """What to try before anything random."""
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
    """The problem's own, one by size, or any."""
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
