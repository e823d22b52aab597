"""Phases of a search, run on their own."""

from __future__ import annotations

from fpipe.schedule.searching.portfolio import Entry, Meter, Phase, Standing, run
from fpipe.schedule.searching.problem import Order, Problem


def last_found(phase: Phase, otherwise: Order) -> Order:
    """What a phase that betters an order finds last, or what it began with."""
    for step in phase:
        if step.found is not None:
            otherwise = step.found.order
    return otherwise


def standing_of(problem: Problem) -> Standing:
    """What is known of a problem before anything is found."""
    standing = Standing()
    standing.raise_bound(problem, problem.bound)
    return standing


def run_alone(phase: Phase, standing: Standing, iterations: int) -> None:
    """A search of one phase."""
    run([Entry(1.0, phase)], standing, Meter(0, iterations))
