"""Pipelines as transforms take them, and pipelines that run another one and return other things."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar

from fpipe.definition import Definition
from fpipe.engine import Pipeline
from fpipe.errors import StageError, a_type
from fpipe.schedule import Schedule


class Transformable(Protocol):
    """A pipeline of any kind: a transform makes another one of a definition alone."""

    definition: Definition

    def __init__(self, definition: Definition) -> None: ...


class Trained(Protocol):
    """A pipeline with an optimizer."""

    def of_members(self, transform: Callable[[Pipeline], Pipeline]) -> Any:
        """The same for an ensemble, whose pipeline `transform` makes."""


P = TypeVar("P", bound=Transformable)
PT = TypeVar("PT", bound=Transformable | Trained)


def check_pipeline(transform: str, pipe: Any) -> None:
    """Refuse what is no pipeline.

    Raises:
        StageError: names the transform.
    """
    if not isinstance(getattr(pipe, "definition", None), Definition):
        raise StageError(
            f"pipe={pipe!r:.60} is {a_type(pipe)}: fpipe.{transform} takes a pipeline, "
            "which fpipe.pipeline(...) makes, and gives another"
        )


class Wrapping:
    """A pipeline whose methods return something else than those of `Pipeline`.

    Args:
        definition: as for `Pipeline`.
        pipeline: one that was made from it, if there is one.

    Attributes:
        definition: all that it was made from.
        pipeline: the pipeline that it runs.
        schedule: the schedule of that.
        rank: the rank of that.
    """

    def __init__(self, definition: Definition, pipeline: Pipeline | None = None) -> None:
        self.definition = definition
        self.pipeline = pipeline or Pipeline(definition)
        self.schedule, self.rank = self.pipeline.schedule, self.pipeline.rank

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.pipeline!r}>"

    def with_schedule(self, schedule: Schedule) -> Self:
        """The same under another schedule, as `Pipeline.with_schedule`."""
        pipe = self.pipeline.with_schedule(schedule)
        return type(self)(pipe.definition, pipe)

    def local(self, params: Any) -> Any:
        """Parameters, or a vector, without those of other processes, as `Pipeline.local`."""
        return self.pipeline.local(params)
