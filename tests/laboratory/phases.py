"""Phases of a search, run on their own."""

from __future__ import annotations

from fpipe.schedule.orders.problem import Order, Problem
from fpipe.schedule.phases.portfolio import Entry, Incumbents, Meter, Phase, run


def last_found(phase: Phase, otherwise: Order) -> Order:
    """What a phase that betters an order finds last, or what it began with."""
    for step in phase:
        if step.candidate is not None:
            otherwise = step.candidate.order
    return otherwise


def incumbents_of(problem: Problem) -> Incumbents:
    """What is known of a problem before anything is found."""
    incumbents = Incumbents()
    incumbents.raise_bound(problem, problem.bound)
    return incumbents


def run_alone(phase: Phase, incumbents: Incumbents, iterations: int) -> None:
    """A search of one phase."""
    run([Entry(1.0, phase)], incumbents, Meter(0, iterations))
