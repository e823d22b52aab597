"""What a pipeline asks of whoever drives its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

from fpipe.execute.header import Addend, Marked
from fpipe.execute.keys import Words
from fpipe.inputs.batch import SplitBatch
from fpipe.inputs.params import Parameters
from fpipe.inputs.signature import Goal
from fpipe.plan.gradient_kinds import Squares
from fpipe.plan.plan import Plan
from fpipe.plan.planner import Planner
from fpipe.plan.total import Total
from fpipe.program.interpreter import Run
from fpipe.program.program import Program

T = TypeVar("T")

Gather = Callable[[Any], list[Any]]
"""From a picklable value of this process to those of all of them, by rank."""


Enter = Callable[[], tuple[Any, Any]]
"""Makes parameters and batch, as stages take them, of the caller's arguments; may refuse them."""


class Reader(NamedTuple):
    """How what a pipeline is called with is read; each refuses what is wrong.

    Attributes:
        params: flattens parameters, of which other processes' parts may be missing.
        split: makes microbatches of a batch.
        key: checks a key.
        common: the part of a batch that is the same in every process; its leaves come first.
    """

    params: Callable[[Any], Parameters]
    split: Callable[[Any], SplitBatch]
    key: Callable[[Any], Words | None]
    common: Callable[[Any], Any]


class Finished(NamedTuple):
    """A step that ran.

    Attributes:
        params: the parameters that it ran on.
        plan: what it ran by.
        runs: the runs of this process's ranks, with their results in their slots.
        total: what the loss of the batch is made of, where the goal has one.
        batch: as stages take it.
        squares: of the gradients of all ranks, where the plan clips.
    """

    params: Parameters
    plan: Plan
    runs: Sequence[Run]
    total: Total | None
    batch: Any
    squares: Squares | None = None


class Controller(Protocol):
    """Drives the ranks that belong to this process.

    Attributes:
        planner: made the plans that it runs by.
    """

    planner: Planner

    def run(self, enter: Enter, goal: Goal, key: Any = None, name: str | None = None) -> Finished:
        """Plan, if the shapes are new, and run all programs to their end."""

    def telling(self, goal: Goal) -> AbstractContextManager[None]:
        """Within it a call is made, which may be refused before other processes know of it."""

    def programs(self, enter: Enter, goal: Goal) -> tuple[Program, ...]:
        """The programs of a training step on arguments of these shapes."""

    def add_up(self, call: str, deed: str, make: Callable[[], Addend]) -> Marked:
        """The sum of what `make` returns over all processes; where it raises, one cannot `deed`.

        `call` is one of `CALLS`, which all of them are in; numbers bring the same key.
        """

    def together(self, call: str, work: Callable[[Gather], T]) -> T:
        """Do what all processes do at once, under the watch; `call` says what it is."""
