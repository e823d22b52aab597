"""A schedule simulator as simple as can be, to check the library's own against.

It shares no code with fpipe.schedule: ranks are asked in turn whether their next action can run,
until none can. Slow, and plainly right.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import fpipe

Time = Fraction


@dataclass(frozen=True)
class Run:
    """A schedule that ran to its end: start and end of every action, row by row."""

    schedule: fpipe.Schedule
    times: list[list[tuple[Time, Time]]]

    @property
    def makespan(self) -> Time:
        return max(end for row in self.times for _, end in row)

    @property
    def span(self) -> Time:
        """The longest rank's own time, from its first start to its last end."""
        return max(row[-1][1] - row[0][0] for row in self.times if row)

    @property
    def work(self) -> Time:
        """The busiest rank's time at work."""
        return max(sum((end - start for start, end in row), Time(0)) for row in self.times)

    @property
    def bubble(self) -> Time:
        return self.makespan - self.work

    @property
    def peak(self) -> Time:
        """Most microbatches that a rank holds at once, a stage's counted as 1/v."""
        per_rank = Time(self.schedule.num_stages, self.schedule.num_ranks)
        return max(map(_peak, self.schedule.actions)) / per_rank


def _peak(row: tuple[fpipe.Action, ...]) -> int:
    held = highest = 0
    for action in row:
        held += {"F": 1, "B": -1, "W": -1}.get(action.op, 0)
        highest = max(highest, held)
    return highest


def run(schedule: fpipe.Schedule, f: int = 1, i: int = 1, w: int = 1, hop: int = 0) -> Run | None:
    """Run it, or None where it gets stuck. Times are per rank: a stage takes 1/v of them."""
    share = Time(schedule.num_ranks, schedule.num_stages)
    cost = {"F": f * share, "I": i * share, "W": w * share, "B": (i + w) * share}
    last = schedule.num_stages - 1
    every = {action for row in schedule.actions for action in row}
    ended: dict[tuple[int, str, int | None], Time] = {}
    times: list[list[tuple[Time, Time]]] = [[] for _ in schedule.actions]

    def arrival(source: int, kind: str, microbatch: int | None, rank: int) -> Time | None:
        end = ended.get((source, kind, microbatch))
        away = schedule.placement[source] != rank
        return None if end is None else end + (hop if away else 0)

    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(schedule.actions):
            while len(times[rank]) < len(row):
                stage, op, microbatch = row[len(times[rank])]
                inputs: list[Time | None] = []
                if op == "F" and stage > 0:
                    inputs = [arrival(stage - 1, "forward", microbatch, rank)]
                if op == "W" and (stage, "I", microbatch) in every:
                    inputs = [arrival(stage, "input gradient", microbatch, rank)]
                elif op in ("B", "I", "W"):  # a W without an I is all the backward there is
                    inputs = [arrival(stage, "forward", microbatch, rank)]
                    if stage < last:
                        inputs.append(arrival(stage + 1, "input gradient", microbatch, rank))
                known = [time for time in inputs if time is not None]
                if len(known) < len(inputs):
                    break
                free = times[rank][-1][1] if times[rank] else Time(0)
                start = max([free, *known])
                end = start + cost.get(op, Time(0))
                times[rank].append((start, end))
                kind = {"F": "forward", "B": "input gradient", "I": "input gradient"}.get(op, op)
                ended[stage, kind, microbatch] = end
                progress = True
    if any(len(done) < len(row) for done, row in zip(times, schedule.actions, strict=True)):
        return None
    return Run(schedule, times)
