"""The content of a picture in any form: timed boxes, waits, messages, memory; also in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple, TypeVar

from fpipe.errors import ScheduleError
from fpipe.schedule.action import Action, Op
from fpipe.schedule.cost import Cost
from fpipe.schedule.dependencies import earliest_starts
from fpipe.schedule.grid import Rows, one_line, sizes
from fpipe.schedule.picture.captions import short, timed
from fpipe.schedule.placements import stages_on
from fpipe.schedule.simulation.events import (
    Event,
    Events,
    Hop,
    Position,
    Steps,
    Wait,
    held,
    is_beside,
    partners,
    sendings,
    time_taken,
    waits_of,
)


class Box(NamedTuple):
    """An action as it is drawn. Times count from the first start.

    Attributes:
        action: the action.
        start: its start.
        end: its end.
        turn: place of its stage among the stages of the rank, from 0; it chooses the shade.
        waited: the action that it waited for last; None for none.
        ready: when the output of that action was there: its end plus the latency.
        beside: it is a collective in a lane beside the rank.
        half: of a pair that runs together, which one: 1 or 2; 0 where it runs alone.
    """

    action: Action
    start: float
    end: float
    turn: int
    waited: Position | None
    ready: float
    beside: bool = False
    half: int = 0


class Carried(NamedTuple):
    """A message while it occupies a link.

    Attributes:
        source: the rank that sends it.
        target: the rank that it goes to.
        action: the action that made it.
        start: when it leaves.
        end: when the link is free again.
        at: the place of the action in the row of its rank.
        way: the name of the link (see `Cost.way`).
    """

    source: int
    target: int
    action: Action
    start: float
    end: float
    at: int
    way: tuple[int, ...]


class LinkLane(NamedTuple):
    """A link as it is drawn: its name, and its messages in order of time."""

    name: str
    messages: tuple[Carried, ...]


@dataclass(frozen=True)
class Chart:
    """The data of all pictures of a timeline.

    Attributes:
        name: of the schedule.
        placement: the rank of each stage.
        rows: the boxes of each rank, in order.
        memory: per rank, pairs of a time and the activations held from then on.
        messages: every value that goes from rank to rank.
        carried: the messages on links, where transfers take any time.
        unit: of time, such as "s"; "" for no name.
        note: on the times, for the reader; "" for none.
        counts_microbatches: activations are in microbatches on 1/p of the model, because there is
            no cost with another unit.
    """

    name: str
    placement: tuple[int, ...]
    rows: tuple[tuple[Box, ...], ...]
    memory: tuple[Steps, ...]
    messages: tuple[Hop, ...]
    carried: tuple[Carried, ...]
    unit: str
    note: str
    counts_microbatches: bool

    @cached_property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        return max((box.end for row in self.rows for box in row), default=0.0)

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """The most that each rank holds."""
        return tuple(max((amount for _, amount in steps), default=0.0) for steps in self.memory)

    @cached_property
    def microbatches(self) -> int:
        """Number of microbatches: one more than the greatest that is named."""
        named = (box.action.microbatch for row in self.rows for box in row)
        return max((number for number in named if number is not None), default=-1) + 1

    @cached_property
    def links(self) -> tuple[LinkLane, ...]:
        """The links that carry messages, those of the first ranks first."""
        lanes: dict[tuple[int, ...], list[Carried]] = {}
        for message in sorted(self.carried, key=lambda each: each.start):
            lanes.setdefault(message.way, []).append(message)
        return tuple(
            LinkLane(_name_of(way, lanes[way]), tuple(lanes[way])) for way in sorted(lanes)
        )

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """The fraction of the makespan in which each rank runs nothing."""
        ran = (((b.start, b.end) for b in row if not b.beside) for row in self.rows)
        whole = self.makespan
        return tuple(max(0.0, 1 - time_taken(row) / whole) if whole else 0.0 for row in ran)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of `rank`, in order."""
        return stages_on(self.placement, rank)


def draw_up(
    name: str,
    placement: tuple[int, ...],
    events: Events,
    cost: Cost | None,
    *,
    unit: str | None = None,
    note: str = "",
    waits: bool = True,
) -> Chart:
    """The chart of the events of all ranks.

    Without a cost, a value arrives when its source ends, F keeps one microbatch on 1/p of the
    model, and the unit of time is seconds by default. The waits of a schedule that cannot run would
    be circular, so they can be left out.

    Raises:
        ScheduleError: `unit` is not text, or the placement lacks the stage of an action.
    """
    if unit is None:
        unit = "s" if cost is None else ""
    if not isinstance(unit, str):
        raise ScheduleError(f"unit={unit!r:.60} must be text, such as 'ms', or None")
    for rank, row in enumerate(events):
        for at, (_, action, _, _) in enumerate(row):
            if not 0 <= action.stage < len(placement):
                raise ScheduleError(
                    f"{action} (actions[{rank}][{at}]) is of stage {action.stage}, and the "
                    f"placement has {len(placement)} stages: fpipe.verify tells all that is amiss"
                )
    zero = min((row[0].start for row in events if row), default=0.0)
    turns = _turns(placement)
    waited: list[list[Wait]] = [[Wait(None, event.start) for event in row] for row in events]
    messages: list[Hop] = []
    if waits:
        waited, messages = waits_of(events, cost)
    rows = tuple(
        tuple(
            Box(
                event.action,
                event.start - zero,
                event.end - zero,
                turns[event.action.stage],
                source,
                ready - zero,
                is_beside(event, cost),
                0 if at not in together else 1 if together[at] > at else 2,
            )
            for at, (event, (source, ready)) in enumerate(zip(row, row_waits, strict=True))
        )
        for row, row_waits in zip(events, waited, strict=True)
        for together in [partners(row, cost)]
    )
    costs = (cost or Cost(1, 1, 1)).on(placement, len(events))
    memory = (tuple((time - zero, amount) for time, amount in held(row, costs)) for row in events)
    carried: list[Carried] = []
    if cost is not None and cost.has_transfers:
        for ((rank, at), target), way in sendings(events, cost).items():
            action, start, end = events[rank][at].action, way.start - zero, way.end - zero
            if end > start:
                link = cost.way(rank, target)
                carried.append(Carried(rank, target, action, start, end, at, link))
    return Chart(
        name=name,
        placement=placement,
        rows=rows,
        memory=tuple(memory),
        messages=tuple(messages),
        carried=tuple(carried),
        unit=unit,
        note=note,
        counts_microbatches=cost is None,
    )


Name = TypeVar("Name")


def fillings(
    row: Sequence[Box],
    span: float,
    columns: int,
    name: Callable[[Box], Name],
    start: float = 0.0,
) -> list[Mapping[Name, float]]:
    """The content of each of so many columns of time, from `start`: the time of each name in it.

    Boxes beside the rank are left out, and those of equal names counted together.
    """
    times: list[defaultdict[Name, float]] = [defaultdict(float) for _ in range(columns)]
    until = start + span * columns
    for box in row:
        if box.beside or box.end <= start or box.start >= until:
            continue
        at = min(max(int((box.start - start) / span), 0), columns - 1) if span else 0
        while at < columns and start + at * span < box.end:
            inside = min(box.end, start + (at + 1) * span) - max(box.start, start + at * span)
            times[at][name(box)] += inside
            at += 1
    return [*times]


def _name_of(way: tuple[int, ...], messages: Sequence[Carried]) -> str:
    """The ranks that a link joins, or its number where these are many."""
    hops = sorted({(each.source, each.target) for each in messages})
    if len(hops) == 1:
        return f"{hops[0][0]} → {hops[0][1]}"
    if len(hops) == 2 and hops[0] == hops[1][::-1]:
        return f"{hops[0][0]} ↔ {hops[0][1]}"
    return f"link {way[0]}"


def _turns(placement: Sequence[int]) -> list[int]:
    """The place of each stage among the stages of its rank."""
    seen: dict[int, int] = {}
    turns = []
    for rank in placement:
        turns.append(seen.get(rank, 0))
        seen[rank] = turns[-1] + 1
    return turns


def unit_chart(schedule: Rows, name: str, *, waits: bool = True) -> Chart:
    """The chart of a schedule with one unit of time for each of F, I and W per rank, two for B.

    Sending takes none. A schedule that cannot run is drawn as its plain rows, with a note. Without
    waits and messages it is made faster.

    Example:
        >>> from fpipe.schedule.families.single_stage import gpipe
        >>> unit_chart(gpipe(ranks=2, microbatches=4), "gpipe").makespan
        15.0
    """
    rows, stages = schedule.actions, len(schedule.placement)
    share = len(rows) / stages  # the unit of a rank, divided by its stages; other ops take no time
    lengths: dict[str, float] = {Op.F: share, Op.I: share, Op.W: share, Op.B: 2 * share}
    starts, note = earliest_starts(rows, stages, lengths), "unit costs"
    runs = starts is not None
    if starts is None:
        note = "cannot run as it stands: fpipe.verify says why"
        starts = [
            list(accumulate((lengths.get(action.op, 0) for action in row), initial=0.0))[:-1]
            for row in rows
        ]
    events = [
        [
            Event(rank, action, start, start + lengths.get(action.op, 0))
            for action, start in zip(row, times, strict=True)
        ]
        for rank, (row, times) in enumerate(zip(rows, starts, strict=True))
    ]
    return draw_up(
        name, schedule.placement, events, Cost(f=1, i=1, w=1), note=note, waits=waits and runs
    )


SPOKEN: Final = 16  # ranks of which a description tells one by one
BETWEEN: Final = " · "  # between two facts


def facts(chart: Chart) -> str:
    """The size and the makespan of a schedule, and the note on its times."""
    texts = [
        sizes(len(chart.rows), len(chart.placement), chart.microbatches),
        f"makespan {timed(chart.makespan, chart.unit)}",
        *([chart.note] if chart.note else []),
    ]
    return BETWEEN.join(texts)


def stage_names(chart: Chart, rank: int) -> str:
    """The stages of a rank in words; empty if it runs only the stage of the same number."""
    stages = chart.stages_of(rank)
    if stages == (rank,):
        return ""
    if not stages:
        return "no stage"
    named = ", ".join(map(str, stages)) if len(stages) < 4 else f"{stages[0]}, {stages[1]}, …"
    return f"{'stage' if len(stages) == 1 else 'stages'} {named}"


def idle(chart: Chart, rank: int) -> str:
    """The idle share of a rank, in percent."""
    return f"idle {100 * chart.idle[rank]:.1f} %"


def described(chart: Chart) -> str:
    """A picture of the chart in words, for readers who do not see it."""
    ranks = range(len(chart.rows))
    each = [f"rank {rank} {idle(chart, rank)}, peak {short(chart.peaks[rank])}" for rank in ranks]
    if len(each) > SPOKEN:
        least, most = (short(100 * edge(chart.idle)) for edge in (min, max))
        peaks = f"peaks up to {short(max(chart.peaks))}"
        each = [f"idle {least} to {most} % of the time of a rank, {peaks}"]
    name = one_line(chart.name)
    return f"{name}: {facts(chart).replace(BETWEEN, ', ')}; {'; '.join(each)}."
