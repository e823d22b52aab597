"""Evaluate an order quickly: its makespan or span, and whether it fits the memory."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Protocol

from fpipe.schedule.bounds.states import FORWARD, GRADIENT, WEIGHT
from fpipe.schedule.orders.problem import Order, Problem, to_rows
from fpipe.schedule.orders.whole_stage_work import WholeStageWork
from fpipe.schedule.simulation.clocks import run_rows
from fpipe.schedule.simulation.link_queues import Link

_NOT_YET = -1.0


class Tables(Protocol):
    """An evaluator, or the mean of several."""

    @property
    def problem(self) -> Problem: ...

    def times(
        self, rows: list[list[int]], fused: AbstractSet[int], limit: float = ...
    ) -> tuple[float, list[float]]: ...

    def fits(self, rank: int, row: list[int], fused: AbstractSet[int]) -> bool: ...

    def fits_all(self, order: Order) -> bool: ...

    def critical(self, order: Order, ends: list[float]) -> list[int]: ...


@dataclass(frozen=True)
class Evaluator:
    """A problem's actions as flat tables, by the number of the action (see `problem`).

    Attributes:
        problem: the problem.
        duration: time of each action; of I, where it may be fused.
        source: the action whose output it reads, or -1.
        delay: the latency from there.
        change: of the memory held.
        after: the least time from its end to the end of the step.
        links: the link that takes its output to another rank, and the time of the transfer; None
            where there is none. No table of them where no transfer takes any time.
        work: of whole stages, which comes last in the tables; None where there is none.
        rates: by how much each action is longer than usual, in a trial of jitter.
    """

    problem: Problem
    duration: list[float]
    source: list[int]
    delay: list[float]
    change: list[float]
    after: list[float]
    links: list[tuple[int, float] | None] | None = None
    work: WholeStageWork | None = None
    rates: list[float] | None = None

    def times(
        self, rows: list[list[int]], fused: AbstractSet[int], limit: float = float("inf")
    ) -> tuple[float, list[float]]:
        """The value of an order and the end of each action; infinite if it cannot run, or as soon
        as the makespan is sure to exceed `limit`."""
        if self.problem.costs.entangled:
            return self._simulated(rows, fused)
        duration, source, delay, after = self.durations(fused), self.source, self.delay, self.after
        if self.work is not None:
            rows = self.work.dressed(rows)
        ends = [_NOT_YET] * len(duration)
        links = self.links
        # When the output of each action leaves: on a link, after those before it.
        sent = ends if links is None else ends.copy()
        lines = [0.0] * (0 if links is None else len(rows) ** 2)  # when each link is free
        clocks, places = [0.0] * len(rows), [0] * len(rows)
        firsts = [0.0] * len(rows)
        waiting: dict[int, int] = {}
        ready = list(range(len(rows)))
        while ready:
            rank = ready.pop()
            row, now, at = rows[rank], clocks[rank], places[rank]
            size = len(row)
            while at < size:
                action = row[at]
                if (reads := source[action]) >= 0:
                    arrival = ends[reads]
                    if arrival < 0:
                        waiting[reads] = rank
                        break
                    if hop := delay[action]:
                        arrival = sent[reads] + hop
                    if arrival > now:
                        now = arrival
                        if now + duration[action] + after[action] > limit:
                            return float("inf"), ends
                if at == 0:
                    firsts[rank] = now
                now += duration[action]
                ends[action] = now
                if links is not None:
                    if (link := links[action]) is None:
                        sent[action] = now
                    else:
                        line, time = link
                        sent[action] = begin = max(now, lines[line])
                        lines[line] = begin + time
                if action in waiting:
                    ready.append(waiting.pop(action))
                at += 1
            clocks[rank], places[rank] = now, at
        if waiting:
            return float("inf"), ends
        if self.work is not None:
            self.work.finish(rows, ends, duration)
            if self.problem.objective == "span":
                return max(self.work.spans(rows, ends, firsts)), ends
            return max(ends), ends
        if self.problem.objective == "span":
            return max(end - first for end, first in zip(clocks, firsts, strict=True)), ends
        return max(clocks), ends

    def _simulated(
        self, rows: list[list[int]], fused: AbstractSet[int]
    ) -> tuple[float, list[float]]:
        """The same by a simulation, where the tables do not tell all."""
        problem = self.problem
        times: list[list[float]] | None = None
        actions = to_rows(problem, Order(0.0, rows, frozenset(fused)))
        if self.rates is not None:
            durations = self.durations(fused)
            times = [[durations[action] for action in row] for row in rows]
        run = run_rows(actions, problem.costs, problem.sizes, times)
        ends = [_NOT_YET] * len(self.duration)
        for row, ended in zip(rows, run.ends, strict=True):
            for action, end in zip(row, ended, strict=False):
                ends[action] = end
        if not run.whole:
            return float("inf"), ends
        if self.work is None and problem.objective == "makespan":
            return max(row[-1] for row in run.ends if row), ends
        return problem.played(Order(0.0, rows, frozenset(fused))).value, ends

    def durations(self, fused: AbstractSet[int]) -> list[float]:
        """The time of each action, where those of `fused` are B."""
        if not fused:
            return self.duration
        durations, count = self.duration.copy(), self.problem.microbatches
        b, sizes = self.problem.costs.b, self.problem.sizes
        for action in fused:
            durations[action] = b[action // (3 * count)] * sizes[action % count]
            if self.rates is not None:
                durations[action] *= self.rates[action]
        return durations

    def with_fused(self, fused: AbstractSet[int]) -> Evaluator:
        """The tables in which a gradient of `fused` costs what B does."""
        if not fused:
            return self
        change, count = self.change.copy(), self.problem.microbatches
        for action in fused:
            change[action] += change[action + count]
        return replace(self, duration=self.durations(fused), change=change)

    def fits(self, rank: int, row: list[int], fused: AbstractSet[int]) -> bool:
        """Whether a row keeps to its rank's memory."""
        held, memory = 0.0, self.problem.memory[rank] * (1 + 1e-9)
        change, count = self.change, self.problem.microbatches
        for action in row:
            if action in fused:
                held += change[action] + change[action + count]
            else:
                held += change[action]
            if held > memory:
                return False
        return True

    def fits_all(self, order: Order) -> bool:
        """Whether every row of an order keeps to its rank's memory."""
        return all(self.fits(rank, row, order.fused) for rank, row in enumerate(order.rows))

    def critical(self, order: Order, ends: list[float]) -> list[int]:
        """The critical path of the order, last action to first."""
        duration, rows, work = self.durations(order.fused), order.rows, self.work
        if work is not None:
            rows = work.dressed(rows)
            work.finish(rows, ends, duration)
        before = {
            action: earlier
            for row in rows
            for earlier, action in zip([-1, *row], row, strict=False)
        }
        tails = [row for row in rows if row]
        if self.problem.objective == "span":
            first = {
                row[-1]: 0.0 if work and work.shards else ends[row[0]] - duration[row[0]]
                for row in tails
            }
            here = max(first, key=lambda action: ends[action] - first[action])
        else:
            here = max((row[-1] for row in tails), key=lambda action: ends[action])
        path, slack = [], self.problem.slack
        while here >= 0:
            path.append(here)
            start = ends[here] - duration[here]
            earlier = before[here]
            if earlier >= 0 and ends[earlier] >= start - slack:
                here = earlier
            else:
                here = self.source[here] if self.source[here] >= 0 else earlier
        return path if work is None else [action for action in path if action < work.first]


def make_evaluator(problem: Problem) -> Evaluator:
    """Lay out a problem's actions as tables."""
    count, costs, stages = problem.microbatches, problem.costs, len(problem.placement)
    sizes, amounts = problem.sizes, problem.amounts
    duration: list[float] = []
    source: list[int] = []
    delay: list[float] = []
    change: list[float] = []
    after: list[float] = []
    starts, returns = costs.earliest
    hand = costs.gradient
    end = returns[0] + hand[0]
    for stage in range(stages):
        first = stage * 3 * count
        kept, freed = costs.activation[stage], costs.freed_by_i[stage]
        # The latencies after F and after I, which do not grow with a microbatch.
        back = sum(costs.up[:stage])
        way = sum(costs.down[stage:]) + sum(costs.up)
        for kind, time, holds, rest, hops in (
            (FORWARD, costs.f[stage], kept, end - starts[stage] - costs.f[stage], way),
            (GRADIENT, costs.i[stage], -freed, end - returns[stage] - hand[stage], back),
            (WEIGHT, costs.w[stage], freed - kept, 0.0, 0.0),
        ):
            duration += [time * size for size in sizes]
            change += [holds * amount for amount in amounts]
            after += [hops + (rest - hops) * size for size in sizes]
            link = None
            if kind == FORWARD:
                if stage and costs.down_links:
                    link = costs.down_links[stage - 1]
                reads, latency = (first - 3 * count, costs.down[stage - 1]) if stage else (-1, 0.0)
            elif kind == WEIGHT:
                reads, latency = first + GRADIENT * count, 0.0
            elif stage < stages - 1:
                if costs.up_links:
                    link = costs.up_links[stage]
                reads, latency = first + (3 + GRADIENT) * count, costs.up[stage]
            else:
                reads, latency = first, 0.0
            source += range(reads, reads + count) if reads >= 0 else [-1] * count
            delay += (
                [latency] * count
                if link is None
                else [link.latency + link.transfer * amount for amount in amounts]
            )
    links = _links(problem) if costs.down_links else None
    if not problem.cost.has_whole_stage:
        return Evaluator(problem, duration, source, delay, change, after, links)
    work = WholeStageWork(problem)
    none = [0.0] * len(work)
    return Evaluator(
        problem,
        duration + work.duration,
        source + work.source,
        delay + none,
        change + none,
        after + none,
        None if links is None else links + [None] * len(work),
        work,
    )


def _links(problem: Problem) -> list[tuple[int, float] | None]:
    """Per action, the link of its output and the time of the transfer."""
    costs, none = problem.costs, Link(0, 0.0, 0.0)
    links: list[tuple[int, float] | None] = []
    for stage in range(len(problem.placement)):
        down = costs.down_links[stage] if stage < len(costs.down_links) else none
        up = costs.up_links[stage - 1] if stage else none
        for link in (down, up, none):
            links += [
                (link.number, link.transfer * amount) if link.transfer else None
                for amount in problem.amounts
            ]
    return links
