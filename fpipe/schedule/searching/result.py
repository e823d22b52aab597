"""What a search found, and how far it can be from the best."""

from __future__ import annotations

from dataclasses import dataclass

from fpipe.schedule.bounds.lower import Objective
from fpipe.schedule.schedule import Schedule
from fpipe.schedule.timing.timeline import Timeline


@dataclass(frozen=True)
class SearchResult:
    """The best schedule that `fpipe.search` found.

    Attributes:
        schedule: the schedule.
        timeline: its simulation under the cost that was searched.
        objective: "makespan" or "span".
        bound: no schedule of the placements that were searched goes below it, in this memory.
        iterations: work done (see `fpipe.search`).
    """

    schedule: Schedule
    timeline: Timeline
    objective: Objective
    bound: float
    iterations: int

    @property
    def value(self) -> float:
        """The makespan or the span, as the objective says."""
        return self.timeline.span if self.objective == "span" else self.timeline.makespan

    @property
    def gap(self) -> float:
        """How far `value` is above `bound`, as a part of it; at 0 there is nothing better."""
        gap = self.value / self.bound - 1 if self.bound else 0.0
        return gap if gap > 1e-9 else 0.0

    def __repr__(self) -> str:
        return (
            f"<SearchResult {self.objective} {self.value:g}, bound {self.bound:g}, "
            f"gap {self.gap:.1%}, {self.iterations} iterations>"
        )
