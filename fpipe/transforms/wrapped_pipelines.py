"""Pipelines as transforms take them, and pipelines that run another one and return other things."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, Self, TypeVar

from fpipe.engine import Engine
from fpipe.errors import StageError, a_type
from fpipe.pipelines import HasEngine, Pipeline, engine_of
from fpipe.schedule import Schedule
from fpipe.spec.definition import Definition


class Transformable(HasEngine, Protocol):
    """A pipeline of any kind: a transform makes another one of a definition alone."""

    def __init__(self, definition: Definition) -> None: ...


class Trained(Protocol):
    """A pipeline with an optimizer."""

    def of_members(self, transform: Callable[[Pipeline], Pipeline]) -> Any:
        """The same for an ensemble, whose pipeline `transform` makes."""


P = TypeVar("P", bound=Transformable)
PT = TypeVar("PT", bound=Transformable | Trained)


def definition_of(transform: str, pipe: Transformable) -> Definition:
    """The definition of what a transform was given.

    Raises:
        StageError: it is no pipeline; names the transform.
    """
    engine = getattr(pipe, "_engine", None)
    if not isinstance(engine, Engine):
        raise StageError(
            f"pipe={pipe!r:.60} is {a_type(pipe)}: fpipe.{transform} takes a pipeline, "
            "which fpipe.pipeline(...) makes, and gives another"
        )
    return engine.definition


class Wrapping:
    """A pipeline whose methods return something else than those of `Pipeline`.

    Args:
        definition: as for `Pipeline`.
        like: as for `Pipeline`.

    Attributes:
        schedule: what it runs.
        rank: the rank that this process drives; None if it drives all of them.
    """

    def __init__(self, definition: Definition, like: Engine | None = None) -> None:
        self._pipeline = Pipeline(definition, like)
        self._engine = engine_of(self._pipeline)
        self.schedule, self.rank = self._engine.schedule, self._engine.rank

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._pipeline!r}>"

    def with_schedule(self, schedule: Schedule) -> Self:
        """The same under another schedule, as `Pipeline.with_schedule`."""
        return type(self)(replace(self._engine.definition, schedule=schedule), like=self._engine)

    def local(self, params: Any) -> Any:
        """Parameters, or a vector, without those of other processes, as `Pipeline.local`."""
        return self._engine.local(params)
