"""The clock of each rank as it runs its row: when every action starts and ends."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import Final, NamedTuple

from fpipe.schedule.action import Action, Op
from fpipe.schedule.simulation.link_queues import Link, Queues
from fpipe.schedule.stage_costs import StageCosts

_NOT_YET: Final = -1.0


class Times(NamedTuple):
    """The result of `run_rows`.

    Attributes:
        starts: per row, the start of each action.
        ends: per row, the end of each action.
        whole: every action ran, in an order that makes sense, and each stage did the same work on
            every microbatch.
        pairs: rank and place of each F that ran together with the B behind it.
    """

    starts: list[list[float]]
    ends: list[list[float]]
    whole: bool
    pairs: list[tuple[int, int]]


def run_rows(
    rows: Sequence[Sequence[Action]],
    costs: StageCosts,
    sizes: Sequence[float],
    times: Sequence[Sequence[float]] | None = None,
) -> Times:
    """Starts and ends of the actions of each row, in its order.

    A row ends early at an action whose input never comes, or that is repeated or out of order.

    The costs are for a microbatch of size 1. Where `times` are there, they say how long each action
    of each row takes.
    """
    if not costs.shared or costs.pair is None:
        return _Run(rows, costs, sizes, times).times_of_all()
    # Which actions run together does not depend on times. Messages of ranks that share a link are
    # sent in the order of time, so that has to be known before.
    pairs = _Run(rows, replace(costs, shared=False), sizes, times).times_of_all().pairs
    return _Run(rows, costs, sizes, times, frozenset(pairs)).times_of_all()


class _Run:
    """One run of all rows. Each rank is an iterator, which rests where it waits for something.

    Attributes:
        together: the places of the F's that run together with a B; None to find them.
        messages: their sizes, as multiples of one.
        state: how far the work of each stage and microbatch is, at stage * microbatches +
            microbatch: 1 after F, 2 after I, 3 after W or B.
        forward, backward: when its output arrives at the reader.
        waiting: by what it waits for, a rank; backwards are negative.
        ready: ranks that can go on, the next one last.
        clocks: of ranks that wait until a message is sent.
        lanes: when the last collective of each rank ends.
        gathered, reduced: when the parameters of each stage are there, and its gradients reduced.
        paused: ranks whose next two actions wait to start together, and for what.
        apart: the places of F's that do not wait any longer.
        queues: the messages on links; None where they take no time.
        unsent: messages on links that ranks share: when each is made, by which rank, at which place
            of its row, what it is (as in `waiting`), its way and its size.
        blocked: how many of them a rank waits for.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[Action]],
        costs: StageCosts,
        sizes: Sequence[float],
        times: Sequence[Sequence[float]] | None,
        together: Collection[tuple[int, int]] | None = None,
    ) -> None:
        self.rows, self.costs, self.sizes, self.times = rows, costs, sizes, times
        self.together, self.microbatches = together, len(sizes)
        self.messages = costs.memory_sizes or (1,) * len(sizes)
        self.state = bytearray(len(costs.f) * len(sizes))
        self.forward = [_NOT_YET] * len(self.state)
        self.backward = [_NOT_YET] * len(self.state)
        self.waiting: dict[int, int] = {}
        self.ready = list(range(len(rows)))[::-1]
        self.clocks, self.lanes = [0.0] * len(rows), [0.0] * len(rows)
        self.gathered, self.reduced = [0.0] * len(costs.f), [0.0] * len(costs.f)
        self.paused: dict[int, int] = {}
        self.apart: set[tuple[int, int]] = set()
        self.pairs: list[tuple[int, int]] = []
        self.queues = Queues(costs.links) if costs.down_links else None
        self.unsent: list[tuple[float, int, int, int, Link, float]] = []
        self.blocked = [0] * len(rows)
        self.starts: list[list[float]] = [[] for _ in rows]
        self.ends: list[list[float]] = [[] for _ in rows]

    def times_of_all(self) -> Times:
        """Run all rows as far as they go."""
        ranks = [self._run_row(rank) for rank in range(len(self.rows))]
        while True:
            if self.ready:
                rank = self.ready.pop()
                self.paused.pop(rank, None)  # its input may have come
                next(ranks[rank], None)
            elif self.unsent:
                self._deliver()
            elif self.paused:
                # All ranks wait: the first of these pairs runs one after the other.
                rank = min(self.paused)
                self.apart.add((rank, len(self.ends[rank])))
                del self.waiting[self.paused[rank]]
                self.ready.append(rank)
            else:
                return Times(self.starts, self.ends, self._whole(), self.pairs)

    def _run_row(self, rank: int) -> Iterator[None]:
        """Run the row of a rank, and rest wherever it has to wait."""
        costs, row, sizes, microbatches = self.costs, self.rows[rank], self.sizes, self.microbatches
        times = None if self.times is None else self.times[rank]
        f, i, w, b, down, up = costs.f, costs.i, costs.w, costs.b, costs.down, costs.up
        last, pair, queues, gathered = len(f) - 1, costs.pair, self.queues, self.gathered
        state, forward, backward, waiting = self.state, self.forward, self.backward, self.waiting
        pauses, ready = costs.shared and costs.blocking, self.ready
        start_at, end_at = self.starts[rank], self.ends[rank]
        now, pair_end = 0.0, _NOT_YET  # the end of a pair whose B comes next
        for at, (stage, op, microbatch) in enumerate(row):
            if microbatch is None:
                now = self._run_whole_stage(rank, at, now)
                continue
            if gathered[stage] > now:
                now = gathered[stage]
            key = stage * microbatches + microbatch
            done = state[key]
            if op == Op.F:
                if done:
                    return
                if stage:
                    if forward[key - microbatches] < 0:
                        waiting[key - microbatches] = rank
                        yield
                    if (arrival := forward[key - microbatches]) > now:
                        now = arrival
                takes = f[stage] * sizes[microbatch] if times is None else times[at]
                end = now + takes
                if pair is not None and (partner := (yield from self._partner(rank, at))):
                    begin, more = partner
                    now = max(now, begin)
                    pair_end = end = now + pair * (takes + more)
                    self.pairs.append((rank, at))
                state[key] = 1
                begin, free = now, end
                if stage < last:
                    if queues is not None:
                        free = self._send(rank, at, key, costs.down_links[stage], end)
                    else:
                        forward[key] = end + down[stage]
                        if key in waiting:
                            ready.append(waiting.pop(key))
            elif op == Op.W and done == 2:
                begin = now
                free = end = now + (w[stage] * sizes[microbatch] if times is None else times[at])
                state[key] = 3
            else:
                if done != 1 or op not in (Op.I, Op.B, Op.W):
                    return
                if stage < last:
                    if backward[key + microbatches] < 0:
                        waiting[-1 - key - microbatches] = rank
                        yield
                    if (arrival := backward[key + microbatches]) > now:
                        now = arrival
                # A W here is of a stage that owes no I.
                time = i[stage] if op == Op.I else b[stage] if op == Op.B else w[stage]
                begin = now
                free = end = now + (time * sizes[microbatch] if times is None else times[at])
                state[key] = 2 if op == Op.I else 3
                if pair_end >= 0:
                    begin, free, end, pair_end = start_at[-1], pair_end, pair_end, _NOT_YET
                if stage and op != Op.W:
                    if queues is not None:
                        free = self._send(rank, at, -1 - key, costs.up_links[stage - 1], end)
                    else:
                        backward[key] = end + up[stage - 1]
                        if -1 - key in waiting:
                            ready.append(waiting.pop(-1 - key))
            start_at.append(begin)
            end_at.append(end)
            if free > now:
                now = free
            if pauses and self.blocked[rank] and pair_end < 0:
                self.clocks[rank] = now
                yield
                now = self.clocks[rank]

    def _run_whole_stage(self, rank: int, at: int, now: float) -> float:
        """Run a whole-stage action; return when the rank may go on."""
        costs, lanes, reduced = self.costs, self.lanes, self.reduced
        stage, op, _ = self.rows[rank][at]

        def time(usual: Sequence[float]) -> float:
            return usual[stage] if self.times is None else self.times[rank][at]

        begin = end = now
        if op == Op.UNSHARD:
            begin = max(now, lanes[rank])
            end = begin + time(costs.unshard)
            lanes[rank] = self.gathered[stage] = end
        elif op == Op.REDUCE_GRAD:
            now = max(now, reduced[stage])
            begin = max(now, lanes[rank])
            end = begin + time(costs.reduce_grad)
            lanes[rank] = reduced[stage] = end
        elif op == Op.UPDATE:
            begin = max(now, reduced[stage])
            end = begin + time(costs.update)
        self.starts[rank].append(begin)
        self.ends[rank].append(end)
        return end if op == Op.UPDATE or not costs.collective_lane else now

    def _partner(self, rank: int, at: int) -> Generator[None, None, tuple[float, float] | None]:
        """When the B that runs together with an F can start, and its time; None if there is none.

        Where the gradient that it reads is not there, the rank rests until it is, or until nothing
        else can go on: then there is none.
        """
        costs, count = self.costs, self.microbatches
        stage, _, microbatch = partner_of(self.rows[rank], at) or (0, Op.B, None)
        if microbatch is None or self.state[stage * count + microbatch] != 1:
            return None
        read = (stage + 1) * count + microbatch
        while (
            (rank, at) not in self.apart if self.together is None else (rank, at) in self.together
        ):
            arrival = self.backward[read] if stage < len(costs.f) - 1 else 0.0
            if arrival >= 0:
                time = costs.b[stage] * self.sizes[microbatch]
                if self.times is not None:
                    time = self.times[rank][at + 1]
                return max(arrival, self.gathered[stage]), time
            self.paused[rank] = -1 - read
            self.waiting[-1 - read] = rank
            yield
        return None

    def _send(self, rank: int, at: int, key: int, link: Link, end: float) -> float:
        """Send an output; return when its rank may go on."""
        assert self.queues is not None
        size = self.messages[(key if key >= 0 else -1 - key) % self.microbatches]
        if self.costs.shared and link.transfer:
            heappush(self.unsent, (end, rank, at, key, link, size))
            self.blocked[rank] += self.costs.blocking
            return end
        off, arrival = self.queues.send(link, end, size)
        self._arrive(key, arrival)
        return off if self.costs.blocking else end

    def _deliver(self) -> None:
        """Send the first message that waits: no rank can go on without these, so none will come
        before it."""
        assert self.queues is not None
        end, rank, _, key, link, size = heappop(self.unsent)
        off, arrival = self.queues.send(link, end, size)
        self._arrive(key, arrival)
        if self.costs.blocking:
            self.clocks[rank] = max(self.clocks[rank], off)
            self.blocked[rank] -= 1
            if not self.blocked[rank]:
                self.ready.append(rank)

    def _arrive(self, key: int, arrival: float) -> None:
        if key >= 0:
            self.forward[key] = arrival
        else:
            self.backward[-1 - key] = arrival
        if (reader := self.waiting.pop(key, None)) is not None:
            self.ready.append(reader)

    def _whole(self) -> bool:
        """Whether all actions ran, and every stage did the same on every microbatch, and some."""
        state, count = self.state, self.microbatches
        return (
            count > 0
            and all(len(row) == len(ends) for row, ends in zip(self.rows, self.ends, strict=True))
            and all(
                state[at] and state.count(state[at], at, at + count) == count
                for at in range(0, len(state), count)
            )
        )


def partner_of(row: Sequence[Action], at: int) -> Action | None:
    """The B that may run together with an F: that of another microbatch directly behind it.

    Example:
        >>> row = [Action.parse(word) for word in "0F1 3B0 0F2 3I1".split()]
        >>> str(partner_of(row, 0)), partner_of(row, 2)
        ('3B0', None)
    """
    behind = row[at + 1] if at + 1 < len(row) else None
    if behind is None or behind.op != Op.B or row[at].op != Op.F:
        return None
    return behind if behind.microbatch != row[at].microbatch else None
