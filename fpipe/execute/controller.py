"""The interface through which a pipeline drives its ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from fpipe.execute.header import Addend, Marked
from fpipe.execute.requests import Request
from fpipe.execute.run_result import RunResult
from fpipe.inputs.signature import Goal
from fpipe.plan.planner import Planner
from fpipe.program.program import Program

T = TypeVar("T")

Gather = Callable[[Any], list[Any]]
"""From a picklable value of this process to those of all of them, by rank."""


class Controller(Protocol):
    """Drives the ranks that belong to this process.

    Attributes:
        planner: made the plans that it runs by.
    """

    planner: Planner

    def run(self, request: Request, goal: Goal, name: str | None = None) -> RunResult:
        """Plan, if the shapes are new, and run all programs to their end."""

    def telling(self, goal: Goal) -> AbstractContextManager[None]:
        """Within it a call is made, which may be refused before other processes know of it."""

    def programs(self, request: Request, goal: Goal) -> tuple[Program, ...]:
        """The programs of a training step on arguments of these shapes."""

    def add_up(self, call: str, deed: str, make: Callable[[], Addend]) -> Marked:
        """The sum of what `make` returns over all processes; where it raises, one cannot `deed`.

        `call` is one of `CALLS`, which all of them are in; numbers bring the same key.
        """

    def together(self, call: str, work: Callable[[Gather], T]) -> T:
        """Do what all processes do at once, under the watch; `call` says what it is."""
