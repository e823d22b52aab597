"""The timeline of a step, simulated or recorded: makespan, bubble, peak, critical path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, Final

from fpipe.errors import ScheduleError
from fpipe.schedule.action import Action, Op
from fpipe.schedule.arguments import plain_integer
from fpipe.schedule.bounds.makespan import lower_bound
from fpipe.schedule.cost import PER_MICROBATCH, Cost, check_cost
from fpipe.schedule.exchange.files import PathLike, save
from fpipe.schedule.grid import one_line
from fpipe.schedule.schedule import LARGEST_SHOWN, Schedule
from fpipe.schedule.simulation.events import (
    Event,
    Steps,
    Transfer,
    critical_path,
    held,
    is_beside,
    time_taken,
    transfers,
)
from fpipe.schedule.stage_costs import StageCosts
from fpipe.schedule.verifier import check_schedule

if TYPE_CHECKING:
    from fpipe.schedule.picture.chart_data import Chart


_HALVES: Final = {Op.B: 2, Op.I: 1, Op.W: 1}
_WHOLE_STAGE: Final = {
    "unshard": Op.UNSHARD,
    "reduce_grad": Op.REDUCE_GRAD,
    "update": Op.UPDATE,
}


@dataclass(frozen=True)
class Timeline:
    """Start and end of every action of a step, simulated (`fpipe.simulate`) or recorded.

    Times are in the unit of the cost, or in seconds where they were recorded. Everything but the
    fields is computed on first use.

    Attributes:
        schedule: the schedule that ran.
        events: one tuple per rank, in the order in which the rank ran them.
        cost: the cost of the simulation; None for a recorded run whose costs are unknown.
        trials: the makespans of trials with jitter; none where there is no jitter.

    Raises:
        ScheduleError: `schedule` or `cost` has another type, there is not one row of events per
            rank, or the cost is for another number of microbatches.

    Example:
        >>> import fpipe
        >>> gpipe = fpipe.schedules.gpipe(ranks=2, microbatches=4)
        >>> timeline = fpipe.simulate(gpipe, fpipe.Cost(f=1, i=1, w=1))
        >>> timeline.makespan, timeline.bubble, timeline.peak
        (15.0, (3.0, 3.0), (4, 4))
        >>> print(*(event.action for event in timeline.critical_path))
        0F0 1F0 1F1 1F2 1F3 1B0 0B0 0B1 0B2 0B3
    """

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]
    cost: Cost | None = None
    trials: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_schedule(self.schedule)
        if self.cost is not None:
            check_cost(self.cost)
            self.cost.sizes_of(self.schedule.num_microbatches)
            self.cost.memory_sizes_of(self.schedule.num_microbatches)
        rows, ranks = self.events, self.schedule.num_ranks
        if not isinstance(rows, Sequence) or len(rows) != ranks:
            raise ScheduleError(
                f"events={rows!r:.60} must have a tuple of events for each of the {ranks} ranks"
            )

    @cached_property
    def start(self) -> float:
        """When the first action of any rank starts."""
        return min((row[0].start for row in self.events if row), default=0.0)

    @cached_property
    def end(self) -> float:
        """When the last action of any rank ends."""
        return max((max(event.end for event in row) for row in self.events if row), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """Time from the first start to the last end over all ranks."""
        return float(self.end - self.start)

    @cached_property
    def mean(self) -> float:
        """The mean makespan of the trials; the makespan where there is no jitter."""
        return fmean(self.trials) if self.trials else self.makespan

    @cached_property
    def spread(self) -> float:
        """The standard deviation of the makespans of the trials; 0 where there is no jitter."""
        return pstdev(self.trials) if self.trials else 0.0

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """The span of each rank: from its first start to its last end."""
        return tuple(
            float(max(event.end for event in row) - row[0].start) if row else 0.0
            for row in self.events
        )

    @property
    def span(self) -> float:
        """The longest span, which the zero-bubble papers report."""
        return max(self.spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank spends in actions, those in a lane beside it apart."""
        return tuple(
            float(time_taken((event.start, event.end) for event in row)) for row in self._occupying
        )

    @cached_property
    def _occupying(self) -> tuple[tuple[Event, ...], ...]:
        """Per rank, the events that are not in a lane of collectives."""
        return tuple(
            tuple(event for event in row if not is_beside(event, self.cost)) for row in self.events
        )

    @cached_property
    def bubble(self) -> tuple[float, ...]:
        """The time of the makespan that each rank spends idle."""
        return tuple(self.makespan - busy for busy in self.busy)

    def idle(self, rank: int) -> tuple[tuple[float, float], ...]:
        """The idle times of `rank` within the makespan: pairs of a start and an end, in order.

        Their lengths add up to ``bubble[rank]``. Other work may fill them, such as that of an
        optimizer (Osawa et al., PipeFisher, https://arxiv.org/abs/2211.14133).

        Raises:
            ScheduleError: there is no such rank.

        Example:
            >>> import fpipe
            >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
            >>> fpipe.simulate(schedule, fpipe.Cost(f=1, i=1, w=1)).idle(0)
            ((2.0, 4.0), (6.0, 7.0))
        """
        row = self._occupying[self._checked(rank)]
        ends = [self.start, *(event.end for event in row)]
        starts = [*(event.start for event in row), self.end]
        gaps = zip(map(float, ends), map(float, starts), strict=True)
        return tuple((end, start) for end, start in gaps if start > end)

    @cached_property
    def peak(self) -> tuple[float, ...]:
        """The most activations that each rank holds at one time.

        In the unit of ``cost.activation``; without a cost, the unit is the activation of one
        microbatch on 1/p of the model.
        """
        return tuple(
            max((amount for _, amount in self.memory(rank)), default=0)
            for rank in range(len(self.events))
        )

    def memory(self, rank: int) -> Steps:
        """The activations on `rank` over time: pairs of a time and the amount held from then on.

        F takes its activation when it starts; I frees ``cost.freed_by_i``, and B or W the rest,
        when it ends. Where a microbatch has no I or no W of a stage, the other frees all; where a
        stage has no backward, F keeps none.

        Raises:
            ScheduleError: there is no such rank.

        Example:
            >>> import fpipe
            >>> schedule = fpipe.schedules.gpipe(ranks=1, microbatches=1)
            >>> fpipe.simulate(schedule, fpipe.Cost(f=1, i=1, w=1)).memory(0)
            ((0.0, 1), (3.0, 0))
        """
        return held(self.events[self._checked(rank)], self._each)

    @cached_property
    def _each(self) -> StageCosts:
        """The cost of each stage, 1 where it is unknown."""
        cost = self.cost or Cost(1, 1, 1)
        return cost.on(self.schedule.placement, self.schedule.num_ranks)

    def _checked(self, rank: int) -> int:
        if plain_integer(rank) not in range(len(self.events)):
            raise ScheduleError(f"rank={rank!r:.60} must be from 0 to {len(self.events) - 1}")
        return rank

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """The actions that determine the makespan, in order of time.

        Each starts when the one before it ends, on the same rank, or when the output of the one
        before it arrives. In a recorded run, each is the last that its successor waited for.
        """
        path = critical_path(self.events, self.cost)
        return tuple(self.events[rank][at] for rank, at in path)

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Every value that goes from rank to rank: its source, its target, its arrival."""
        return tuple(transfers(self.events, self.cost))

    @cached_property
    def bound(self) -> float:
        """A lower bound for all schedules of this placement that hold at most `peak` per rank.

        Raises:
            ScheduleError: the timeline has no cost, or its schedule leaves gradients out, as those
                for evaluation and for frozen stages do.
        """
        if self.cost is None:
            raise ScheduleError(
                "timeline.cost=None has no lower bound: give the recorded timeline a cost, as in "
                "dataclasses.replace(timeline, cost=fpipe.Cost(...))"
            )
        placement = self.schedule.placement
        halves = [0] * len(placement)  # of backwards
        for stage, op, _ in chain.from_iterable(self.schedule.actions):
            halves[stage] += _HALVES.get(op, 0)
        for stage, count in enumerate(halves):
            # The bound counts a whole backward of every microbatch: less would need a lower one.
            if count < 2 * self.schedule.num_microbatches:
                raise ScheduleError(
                    f"stage {stage} of {self.schedule.name} has no whole backward, and the bound "
                    "is of steps in which every stage has B, or I and W, of every microbatch"
                )
        values: dict[str, Any] = {name: getattr(self._each, name) for name in PER_MICROBATCH}
        actions = set(chain.from_iterable(self.schedule.actions))
        for name, op in _WHOLE_STAGE.items():  # as far as the schedule does it
            times = enumerate(getattr(self._each, name))
            values[name] = [
                time if Action(stage, op, None) in actions else 0 for stage, time in times
            ]
        cost = replace(self.cost, **values, speed=None)  # which they have in them
        ranks = max(placement) + 1  # the ranks after it have no stage
        return lower_bound(placement, self.schedule.num_microbatches, cost, self.peak[:ranks])

    @property
    def gap(self) -> float:
        """How far the makespan is above `bound`, as a fraction of it: 0.02 is two percent.

        A gap of 0 is a certificate: every faster schedule of this placement needs more memory on
        some rank. A negative gap shows that the cost is not that of the recorded run.

        Raises:
            ScheduleError: as for `bound`.
        """
        gap = self.makespan / self.bound - 1 if self.bound else 0.0
        return gap if abs(gap) > 1e-9 else 0.0

    # Pictures are imported when one is drawn, so that `import fpipe` stays quick.

    def to_text(self, *, width: int = 80) -> str:
        """Draw the timeline to scale in lines of at most `width` characters.

        `fpipe.schedule.picture.strip` explains the letters. Every other picture shows more.

        Raises:
            ScheduleError: `width` is less than 50.

        Example:
            >>> import fpipe
            >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=3)
            >>> print(fpipe.simulate(schedule, fpipe.Cost(f=1, i=1, w=1)).to_text(width=66))
            time    0              5               10
            rank 0  FFFFFF......BBBBBBFFFFBBBBBB...BBBBBB  idle 25.0 %  peak 2
            rank 1  ...FFFBBBBBBFFFBBBBBBBFFFBBBBBB......  idle 25.0 %  peak 1
        """
        from fpipe.schedule.picture.strip import strip

        return strip(self._chart(None, waits=False), width=width)

    def to_svg(
        self,
        path: PathLike | None = None,
        *,
        width: float | None = None,
        unit: str | None = None,
        beside: Sequence[Timeline] = (),
    ) -> str:
        """Draw the timeline as SVG: lanes of coloured boxes, with the memory of each rank beneath.

        Args:
            path: the file to write; None to write none.
            width: in pixels; None for a width in which microbatch numbers fit, within limits.
            unit: of time, for the axis, such as "ms"; None for seconds where this timeline or one
                beside it was recorded, and none where all were simulated.
            beside: more timelines, drawn below this one on the same time scale, such as a recorded
                one below the simulated. Their times must be in the same unit.

        Returns:
            The text of the file.

        Raises:
            ScheduleError: `width` is too small, `unit` is not text, or `beside` is not a sequence
                of timelines.

        Example:
            >>> import fpipe
            >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=3)
            >>> timeline = fpipe.simulate(schedule, fpipe.Cost(f=1, i=1, w=1))
            >>> timeline.to_svg(unit="ms").startswith("<svg")
            True
        """
        from fpipe.schedule.picture.svg import svg

        return save(path, svg(self._charts(unit, beside), width=width))

    def to_html(
        self,
        path: PathLike | None = None,
        *,
        unit: str | None = None,
        beside: Sequence[Timeline] = (),
    ) -> str:
        """Draw the timeline as one HTML file to look around in: hover, zoom, move.

        Over an action it shows start, end and wait. Arguments, result and errors are those of
        `to_svg`.

        Args:
            path: as for `to_svg`.
            unit: as for `to_svg`.
            beside: as for `to_svg`.

        Example:
            >>> import fpipe
            >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=3)
            >>> timeline = fpipe.simulate(schedule, fpipe.Cost(f=1, i=1, w=1))
            >>> "</html>" in timeline.to_html()
            True
        """
        from fpipe.schedule.picture.page import page

        return save(path, page(self._charts(unit, beside)))

    def to_trace(self, path: PathLike | None = None, *, unit: str | None = None) -> str:
        """Write the timeline as a trace for https://ui.perfetto.dev or chrome://tracing.

        `fpipe.schedule.picture.trace` describes its content. Times are exact where `unit` is "s",
        "ms" or "us", or where the timeline was recorded; else a unit is shown as 1 ms. Arguments
        and result are those of `to_svg`.

        Args:
            path: as for `to_svg`.
            unit: as for `to_svg`.

        Example:
            >>> import json
            >>> import fpipe
            >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=3)
            >>> timeline = fpipe.simulate(schedule, fpipe.Cost(f=1, i=1, w=1))
            >>> "traceEvents" in json.loads(timeline.to_trace(unit="ms"))
            True
        """
        from fpipe.schedule.picture.trace import trace

        return save(path, trace(self._chart(unit)))

    def _repr_svg_(self) -> str | None:
        """The picture where a page takes no HTML; None if it would be too large."""
        return self.to_svg() if sum(map(len, self.events)) <= LARGEST_SHOWN else None

    def _repr_html_(self) -> str:
        """The picture in a notebook, as wide as the page at most, however long the timeline."""
        from fpipe.schedule.picture.page import figure

        return figure([self._chart(None, waits=False)])

    def _chart(self, unit: str | None, *, waits: bool = True) -> Chart:
        """The chart of the pictures; much faster without waits and messages."""
        from fpipe.schedule.picture.chart_data import draw_up

        name, placement = self.schedule.name, self.schedule.placement
        note = "recorded" if self.cost is None else ""
        return draw_up(name, placement, self.events, self.cost, unit=unit, note=note, waits=waits)

    def _charts(self, unit: str | None, beside: Sequence[Timeline]) -> list[Chart]:
        if not isinstance(beside, Sequence) or not all(isinstance(t, Timeline) for t in beside):
            raise ScheduleError(
                f"beside={beside!r:.60} must be a sequence of timelines, such as [recorded]; "
                "fpipe.simulate makes one of a schedule"
            )
        timelines = (self, *beside)
        if unit is None and any(timeline.cost is None for timeline in timelines):
            unit = "s"  # of all, because they are on one scale
        return [timeline._chart(unit) for timeline in timelines]

    def __str__(self) -> str:
        """The timeline as text to scale (`to_text` has a choice of width)."""
        return f"{self!r}\n{self.to_text()}"

    def __repr__(self) -> str:
        from fpipe.schedule.picture.captions import timed

        # Recorded times are seconds; those of a cost have no name, and are exact.
        makespan, span = (
            timed(time, "s") if self.cost is None else f"{time:g}"
            for time in (self.makespan, self.span)
        )
        name = one_line(self.schedule.name)
        shaken = f", mean {self.mean:g} ± {self.spread:.2g}" if self.trials else ""
        return f"<Timeline of {name}: makespan {makespan}, span {span}{shaken}>"
