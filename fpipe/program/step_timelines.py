"""Record when each action of a real step ran, as the same `Timeline` that a simulation makes."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from contextvars import ContextVar, Token
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import NamedTuple

from fpipe.errors import FpipeError
from fpipe.schedule import Action, Schedule
from fpipe.schedule.dependencies import dependencies
from fpipe.schedule.grid import one_line
from fpipe.schedule.simulation.events import Event
from fpipe.schedule.timeline import Timeline

Marks = dict[Action, tuple[float, float]]
"""Start and end of actions, in seconds of the host's monotonic clock."""

ACTIVE: ContextVar[record | None] = ContextVar("fpipe.program.step_timelines", default=None)
"""The recording of the current thread or task, if there is one."""


class record:
    """Record the steps of pipelines: ``with fpipe.record() as recording: pipe.step(…)``.

    Costs nothing when it is not used. Over a process group every rank gets the whole timeline, and
    all ranks record when one does; ranks on different hosts are only as well aligned as the times
    of day that these have. On CUDA every action is waited for, which keeps its time
    its own and lets nothing overlap.

    Attributes:
        timelines: one per step (or ``value`` or ``forward``), in order; times in seconds from the
            start of the step's first action.
        alone: collectives of replicas are waited for where they begin, so that their time is theirs
            and nothing overlaps.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.gpipe(ranks=1, microbatches=2)
        >>> stage, loss = (lambda w, x: x * w), (lambda y, _: y.mean())
        >>> pipe = fpipe.pipeline([stage], loss, schedule, compile=False)
        >>> with fpipe.record() as recording:
        ...     result = pipe.step([torch.tensor(2.0)], torch.ones(4))
        >>> print(*(event.action for event in recording.timeline.events[0]))
        0F0 0F1 0B0 0B1
    """

    def __init__(self, *, alone: bool = False) -> None:
        self.timelines: list[Timeline] = []
        self.alone = alone
        self._tokens: list[Token[record | None]] = []

    @property
    def timeline(self) -> Timeline:
        """The last timeline.

        Raises:
            FpipeError: nothing has been recorded.
        """
        if not self.timelines:
            raise FpipeError(
                "nothing has been recorded: run pipe.step within `with fpipe.record() as "
                "recording:` first"
            )
        return self.timelines[-1]

    def __repr__(self) -> str:
        number = len(self.timelines)
        return f"<fpipe.record: {number} timeline{'' if number == 1 else 's'}>"

    def _repr_html_(self) -> str:
        """The last timeline in a notebook, and a table of all."""
        from fpipe.schedule.picture.captions import timed
        from fpipe.schedule.picture.tables import table

        rows = [
            [
                str(number),
                one_line(timeline.schedule.name),
                timed(timeline.makespan, "s"),
                f"{sum(timeline.bubble) / len(timeline.bubble) / (timeline.makespan or 1):.1%}",
            ]
            for number, timeline in enumerate(self.timelines)
        ]
        header = ["timeline", "schedule", "makespan", "idle, mean of ranks"]
        last = self.timelines[-1]._repr_html_() if self.timelines else ""
        return last + table(f"Recorded: {len(rows)} steps", header, rows)

    def __enter__(self) -> record:
        self._tokens.append(ACTIVE.set(self))
        return self

    def __exit__(self, *exception: object) -> None:
        ACTIVE.reset(self._tokens.pop())


class Clock(NamedTuple):
    """A reading of a host's monotonic clock, which counts from when the host started.

    Attributes:
        host: equal where two processes read the same clock.
        ahead: the time of day less the clock's, in seconds.
    """

    host: str
    ahead: float

    @classmethod
    def here(cls) -> Clock:
        """That of this process."""
        try:
            host = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        except OSError:  # no Linux
            host = platform.node()
        return cls(host, time.time() - time.perf_counter())


def aligned(rows: Sequence[tuple[Clock, Marks]]) -> list[Marks]:
    """The marks of all ranks by the clock of the first one.

    Those of the same host are exact. Others are as well aligned as the hosts' times of day.

    Example:
        >>> marks = {Action.parse("0F0"): (4.0, 5.0)}
        >>> rows = aligned([(Clock("a", 7.0), marks), (Clock("b", 5.0), marks)])
        >>> [list(row.values()) for row in rows]
        [[(4.0, 5.0)], [(2.0, 3.0)]]
    """
    first = rows[0][0]
    shifted = []
    for clock, marks in rows:
        by = 0.0 if clock.host == first.host else clock.ahead - first.ahead
        shifted.append({action: (start + by, end + by) for action, (start, end) in marks.items()})
    return shifted


def timeline_of(schedule: Schedule, marks: Sequence[Marks]) -> Timeline:
    """Put the marks of all ranks together.

    An action that had nothing to compute, such as the input gradient of a stage that has no
    parameters before it, takes no time: it stands behind the action before it and behind what it
    would have read, but never behind the start of what its rank ran next.
    """
    origin = min((start for row in marks for start, _ in row.values()), default=0.0)
    graph = dependencies(schedule.actions)
    ran: list[tuple[float, float] | None] = []
    until: list[float] = []  # per action, the start of what its rank ran next
    for actions, row in zip(schedule.actions, marks, strict=True):
        # An UNSHARD may stand in the schedule again, and computes what it does once.
        left = dict(row)
        row_marks = [left.pop(action, None) for action in actions]
        starts = [inf if mark is None else mark[0] - origin for mark in row_marks]
        ran += row_marks
        until += reversed(list(accumulate(reversed(starts), min)))
    ends = [0.0] * len(ran)
    events: list[list[Event]] = [[] for _ in schedule.actions]
    for number in graph.run_order():
        rank, position = graph.place(number)
        mark = ran[number]
        if mark is None:
            before = ends[number - 1] if position else 0.0
            start = max([before, *(ends[need] for need in graph.needs[number])])
            start = end = min(start, until[number])
        else:
            start, end = mark[0] - origin, mark[1] - origin
        ends[number] = end
        events[rank].append(Event(rank, graph.actions[number], start, end))
    return Timeline(schedule, tuple(map(tuple, events)))
