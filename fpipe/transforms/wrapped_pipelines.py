"""What runs another pipeline and returns something else."""

from __future__ import annotations

from typing import Any, Self

from fpipe.definition import Definition
from fpipe.engine import Pipeline
from fpipe.schedule import Schedule


class Wrapping:
    """A pipeline whose methods return something else than `Pipeline`'s do.

    Args:
        definition: as for `Pipeline`.
        pipeline: one that was made from it, if there is one.

    Attributes:
        definition: all that it was made from.
        pipeline: the pipeline that it runs.
        schedule: as of that.
        rank: as of that.
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
        """As `Pipeline.local`, of parameters or a vector."""
        return self.pipeline.local(params)
