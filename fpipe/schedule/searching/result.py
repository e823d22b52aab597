"""The result of a search: the best schedule, how far it may be from the best, and its luck."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, TypeAlias

from fpipe.errors import ScheduleError
from fpipe.schedule.grid import one_line
from fpipe.schedule.orders.problem import Problem
from fpipe.schedule.phases.seeds import named_families
from fpipe.schedule.schedule import Schedule
from fpipe.schedule.simulator import simulate, with_whole_stage
from fpipe.schedule.timeline import Timeline

SearchObjective: TypeAlias = Literal["makespan", "span", "robust"]
USUAL: Final = 0.05  # the jitter at which a result is compared with families


@dataclass(frozen=True)
class SearchResult:
    """The result of `fpipe.search`: the best schedule, and how far it can be from the best of all.

    Attributes:
        schedule: the schedule.
        timeline: its simulation under the cost of the search; for "robust" with trials.
        objective: "makespan", "span" or "robust".
        bound: a lower bound for all placements of the search, in this memory.
        iterations: work done (see `fpipe.search`).
        remat: of each stage, ``"full"`` where it computes again and ``"none"`` where it keeps, as
            ``fpipe.pipeline(remat=)`` takes it; None where the search did not choose. The cost of
            the timeline is then that of the choice.
        cut: how many layers each stage has; None where the search did not choose. The cost of the
            timeline is that of the stages.
        bought: of a search for cuts, what each choice brings: the values of "1F1B" and of a search
            for the "order" with one stage a rank, both with layers cut evenly, then with the best
            "placement", then with the best "cut".
        problems: what was searched.

    Example:
        >>> import fpipe
        >>> result = fpipe.search(
        ...     ranks=2, microbatches=2, cost=fpipe.Cost(f=1, i=1, w=1), iterations=50
        ... )
        >>> result.bound <= result.timeline.makespan
        True
    """

    schedule: Schedule
    timeline: Timeline
    objective: SearchObjective
    bound: float
    iterations: int
    remat: tuple[str, ...] | None = None
    cut: tuple[int, ...] | None = None
    bought: dict[str, float] | None = field(default=None, repr=False)
    problems: tuple[Problem, ...] = field(default=(), repr=False, compare=False)

    @property
    def value(self) -> float:
        """The makespan, the span or the mean makespan, as the objective says."""
        if self.objective == "robust":
            return self.timeline.mean
        return self.timeline.span if self.objective == "span" else self.timeline.makespan

    @property
    def gap(self) -> float:
        """How far `value` is above `bound`, as a fraction of it; at 0 there is nothing better."""
        gap = self.value / self.bound - 1 if self.bound else 0.0
        return gap if gap > 1e-9 else 0.0

    @cached_property
    def shaken(self) -> Timeline:
        """The schedule simulated with 5 % jitter of each action, computed on first use."""
        assert self.timeline.cost is not None
        return simulate(self.schedule, self.timeline.cost, jitter=USUAL)

    @cached_property
    def best_family(self) -> Timeline | None:
        """The named family that fits the memory with the least mean at 5 % jitter.

        Each in the same trials as `shaken`; None where no family fits. Computed on first use.
        """
        timelines = list(self._families())
        return min(timelines, key=lambda timeline: timeline.mean) if timelines else None

    def _families(self) -> Iterator[Timeline]:
        for problem in self.problems:
            for family in named_families(problem):
                schedule = with_whole_stage(family, problem.cost)
                yield simulate(schedule, problem.cost, jitter=USUAL)

    @property
    def loss(self) -> float:
        """The loss of the schedule at 5 % jitter beside the best named family, as a fraction.

        Above 0 the family is faster on average; below 0 the schedule is.

        Raises:
            ScheduleError: no named family fits.
        """
        if self.best_family is None:
            raise ScheduleError("no named family fits this placement and memory: compare by hand")
        return self.shaken.mean / self.best_family.mean - 1

    def _repr_svg_(self) -> str | None:
        """The timeline of the schedule, where a page takes no HTML."""
        return self.timeline._repr_svg_()

    def _repr_html_(self) -> str:
        """The timeline in a notebook, and what the search found, as a table."""
        from fpipe.schedule.picture.tables import table

        rows: list[tuple[str, object]] = [
            (self.objective, float(self.value)),
            ("lower bound of all schedules", float(self.bound)),
            ("above that bound", f"{self.gap:.1%}"),
            ("iterations", self.iterations),
        ]
        if self.remat is not None:
            rows.append(("remat of each stage", ", ".join(self.remat)))
        if self.cut is not None:
            rows.append(("layers of each stage", ", ".join(map(str, self.cut))))
        rows += [(f"best by {name}", value) for name, value in (self.bought or {}).items()]
        name = one_line(self.schedule.name)
        return self.timeline._repr_html_() + table(f"Search: {name}", ["", "value"], rows)

    def __repr__(self) -> str:
        return (
            f"<SearchResult {self.objective} {self.value:g}, bound {self.bound:g}, "
            f"gap {self.gap:.1%}, {self.iterations} iterations>"
        )
