"""Actions with their times: what each of them waited for, and the memory of a rank over time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple, TypeAlias

from fpipe.schedule.action import COMPUTE_OPS, SHARDING_OPS, Action, Op
from fpipe.schedule.cost import Cost
from fpipe.schedule.dependencies import Dependencies, dependencies
from fpipe.schedule.stage_costs import StageCosts


class Event(NamedTuple):
    """One action with the time it took: from `start` to `end` on `rank`."""

    rank: int
    action: Action
    start: float
    end: float


def is_beside(event: Event, cost: Cost | None) -> bool:
    """Whether a simulated event runs in the lane of collectives, beside what its rank does."""
    lane = cost is not None and cost.collective_lane
    return lane and event.action.op in SHARDING_OPS and event.end > event.start


_IN_LANE: Final = frozenset({Op.UNSHARD, Op.REDUCE_GRAD})


def partners(row: Sequence[Event], cost: Cost | None) -> dict[int, int]:
    """The places of a row whose actions run together with their neighbour, and that one's place."""
    together: dict[int, int] = {}
    if cost is not None and cost.pair is not None:
        for at, (event, behind) in enumerate(pairwise(row)):
            ops = event.action.op, behind.action.op
            if ops == (Op.F, Op.B) and event[2:] == behind[2:] and event.end > event.start:
                together[at], together[at + 1] = at + 1, at
    return together


def time_taken(spans: Iterable[tuple[float, float]]) -> float:
    """The time that is in any of these spans, each a start and an end, in order.

    Example:
        >>> time_taken([(0, 2), (3, 5), (3, 5)])
        4.0
    """
    taken, last = 0.0, -math.inf
    for start, end in spans:
        taken += max(0.0, end - max(start, last))
        last = max(last, end)
    return taken


Steps: TypeAlias = tuple[tuple[float, float], ...]  # a time, and the amount held from then on


def counted_as(actions: Sequence[Action]) -> list[Op | None]:
    """The op that each action counts as for the memory of its stage.

    Where a microbatch has no I or no W of a stage, the other is its whole backward, as B is. None
    for an action that changes nothing: an F of a stage without a backward, or a whole-stage action.

    The actions are all of the stages that they name.

    Example:
        >>> counted_as([Action.parse(word) for word in "0F0 0I0 0W0 1F0 1W0 2F0".split()])
        [<Op.F: 'F'>, <Op.I: 'I'>, <Op.W: 'W'>, <Op.F: 'F'>, <Op.B: 'B'>, None]
    """
    halves = {action for action in actions if action.op in (Op.I, Op.W)}
    read = {stage for stage, op, _ in actions if op in (Op.B, Op.I, Op.W)}  # by a backward

    def count(stage: int, op: Op, microbatch: int | None) -> Op | None:
        if op not in COMPUTE_OPS or stage not in read:
            return None
        if op == Op.F or (op == Op.I and (stage, Op.W, microbatch) in halves):
            return op
        return op if op == Op.W and (stage, Op.I, microbatch) in halves else Op.B

    return [count(*action) for action in actions]


def held(row: Sequence[Event], costs: StageCosts) -> Steps:
    """The activations that a rank holds over time.

    F takes its activation when it starts; I frees `freed_by_i`, and B or W the rest, when it ends.
    Where a microbatch has no I or no W of a stage, the other frees all; where a stage has no
    backward, F keeps none.

    The costs are for a microbatch of size 1.

    Example:
        >>> from fpipe import Cost
        >>> row = [Event(0, Action(0, Op.F, 0), 0.0, 1.0), Event(0, Action(0, Op.B, 0), 1.0, 3.0)]
        >>> held(row, Cost(f=1, i=1, w=1, activation=5).on([0]))
        ((0.0, 5), (3.0, 0))
    """
    times: list[float] = []
    changes: list[float] = []
    ops = counted_as([action for _, action, _, _ in row])
    for (_, (stage, _, microbatch), start, end), op in zip(row, ops, strict=True):
        if op is None:
            continue
        sizes = costs.memory_sizes
        size = 1 if sizes is None or microbatch is None else sizes[microbatch]
        kept, freed = costs.activation[stage] * size, costs.freed_by_i[stage] * size
        times.append(start if op == Op.F else end)
        if op == Op.F:
            changes.append(kept)
        elif op == Op.I:
            changes.append(-freed)
        else:
            changes.append(freed - kept if op == Op.W else -kept)
    # Sums of thirds and the like drift; a peak of 2.9999999999999996 reads as a defect.
    largest = max(changes, default=0)
    digits = 12 - math.floor(math.log10(largest)) if 0 < largest < 1 else 12
    amounts = (round(amount, digits) for amount in accumulate(changes))
    return tuple(zip(times, amounts, strict=True))


Position: TypeAlias = tuple[int, int]  # rank, index in the rank's row
Events: TypeAlias = Sequence[Sequence[Event]]  # per rank, in the order in which it ran them


class Wait(NamedTuple):
    """The last thing that an action waited for.

    Attributes:
        source: the action that it waited for; None for none.
        ready: when the output of that action was there: its end, and the time of its message.
    """

    source: Position | None
    ready: float


class Hop(NamedTuple):
    """A value that goes from one rank to another: the actions that make and read it."""

    source: Position
    target: Position


class Transfer(NamedTuple):
    """A value that goes from one rank to another, and its times.

    Attributes:
        source: the action that makes it.
        target: the action that reads it.
        source_rank: the rank of the source.
        target_rank: the rank of the target.
        sent: when its source ended.
        arrives: when its reader may start; without a cost, when its reader did start.
    """

    source: Action
    target: Action
    source_rank: int
    target_rank: int
    sent: float
    arrives: float


def waits_of(events: Events, cost: Cost | None) -> tuple[list[list[Wait]], list[Hop]]:
    """The wait of each action per rank, and every value that goes from rank to rank.

    An action waits for the end of the one before it on its rank, or of its transfer where that
    occupies the rank, and for its inputs to arrive; a collective in a lane for the one before it
    there too; what computes on a stage for what is gathered for it; and an UPDATE for the reduction
    of its gradients. Two that run together wait for the same. On a tie it waited for its rank: a
    path of such waits shows the work that fills the time. An action that took no time and was over
    before an input arrived has not read it: in a real step it had nothing to compute.

    Without a cost latencies count as 0. The messages are in the order of their readers.
    """
    graph = dependencies([[event.action for event in row] for row in events])
    begun = min((row[0].start for row in events if row), default=0.0)
    arrivals = _arrivals(events, graph, cost)
    left = _left(events, arrivals, cost)
    waits: list[list[Wait]] = []
    messages: list[Hop] = []
    for rank, row in enumerate(events):
        waits.append([])
        together = partners(row, cost)
        before: int | None = None  # the last action that occupied the rank
        ahead: int | None = None  # and the one before it
        collective: int | None = None  # and the last one in its lane
        gathers: dict[int, int] = {}
        reductions: dict[int, int] = {}
        for at, event in enumerate(row):
            source: Position | None = None
            ready = begun
            # One that takes no time waits for the lane too, and its rank does not wait for it.
            beside = cost is not None and cost.collective_lane and event.action.op in _IN_LANE
            # An UPDATE waits for the reduction of its stage, what computes for its gathering.
            of_stage = reductions if event.action.op == Op.UPDATE else gathers
            partner = together.get(at, at)
            others = [
                ahead if partner < at else before,
                collective if beside else of_stage.get(event.action.stage),
            ]
            for other in others:
                if other is not None and (source is None or left[rank][other] > ready):
                    source, ready = (rank, other), left[rank][other]
            if beside:
                collective = at
                lane = gathers if event.action.op == Op.UNSHARD else reductions
                lane[event.action.stage] = at
            else:
                before, ahead = at, before
            first = graph.starts[rank]
            # Where two run together, each waits for the inputs of both.
            needs = [(need, at) for need in graph.needs[first + at]]
            if partner != at:
                needs += [(need, partner) for need in graph.needs[first + partner]]
            for need, reader in needs:
                place = graph.place(need)
                arrival = events[place[0]][place[1]].end
                if row[at].start == row[at].end < arrival:
                    continue
                if place[0] != rank:
                    if reader == at:
                        messages.append(Hop(place, (rank, at)))
                    arrival = arrivals[place, rank].arrival
                if source is None or arrival > ready:
                    source, ready = place, arrival
            waits[-1].append(Wait(source, ready))
    return waits, messages


class Sending(NamedTuple):
    """The way of a value to another rank: on the link from `start` to `end`, there at `arrival`."""

    start: float
    end: float
    arrival: float


def sendings(events: Events, cost: Cost | None) -> dict[tuple[Position, int], Sending]:
    """Every value that goes from rank to rank, by the position of its maker and its target rank."""
    graph = dependencies([[event.action for event in row] for row in events])
    return _arrivals(events, graph, cost)


def _arrivals(
    events: Events, graph: Dependencies, cost: Cost | None
) -> dict[tuple[Position, int], Sending]:
    messages: set[tuple[float, int, int, int]] = set()  # when made, by whom and where, for whom
    for number, needs in enumerate(graph.needs):
        target, _ = graph.place(number)
        for rank, at in map(graph.place, needs):
            if rank != target:
                messages.add((events[rank][at].end, rank, at, target))
    free: dict[tuple[int, ...], float] = {}  # when a link is
    sizes = None if cost is None else cost.memory_sizes or cost.sizes
    arrivals = {}
    for ended, rank, at, target in sorted(messages):
        start = end = ended
        latency = 0.0
        if cost is not None:
            latency = cost.hop(rank, target)
            stage, op, name = events[rank][at].action
            size = cost.message_of(stage if op == Op.F else stage - 1)
            if transfer := cost.transfer_between(rank, target) * size:
                if sizes is not None and name is not None:
                    transfer *= sizes[name]
                way = cost.way(rank, target)
                start = max(ended, free.get(way, 0.0))
                end = free[way] = start + transfer
        arrivals[(rank, at), target] = Sending(start, end, end + latency)
    return arrivals


def _left(
    events: Events, arrivals: Mapping[tuple[Position, int], Sending], cost: Cost | None
) -> list[list[float]]:
    """When each action leaves its rank free: at its end, or that of its transfer."""
    left = [[event.end for event in row] for row in events]
    if cost is not None and cost.blocking:
        for ((rank, at), _), sending in arrivals.items():
            left[rank][at] = max(left[rank][at], sending.end)
        for row, ends in zip(events, left, strict=True):
            for at, other in partners(row, cost).items():
                ends[at] = ends[other] = max(ends[at], ends[other])
    return left


def critical_path(events: Events, cost: Cost | None) -> list[Position]:
    """Positions of the actions that the last end waited for, first to last."""
    ends = [
        (event.end, -rank, at) for rank, row in enumerate(events) for at, event in enumerate(row)
    ]
    if not ends:
        return []
    waits, _ = waits_of(events, cost)
    _, rank, at = max(ends)
    here: Position | None = (-rank, at)
    path: list[Position] = []
    while here is not None:
        path.append(here)
        here = waits[here[0]][here[1]].source
    return path[::-1]


def transfers(events: Events, cost: Cost | None) -> Iterator[Transfer]:
    """Every value that crosses ranks, in the order of its readers, rank by rank."""
    arrivals = sendings(events, cost)
    for source, target in waits_of(events, cost)[1]:
        source_rank, maker, _, sent = events[source[0]][source[1]]
        target_rank, reader, start, _ = events[target[0]][target[1]]
        arrives = start if cost is None else arrivals[source, target_rank].arrival
        yield Transfer(maker, reader, source_rank, target_rank, sent, arrives)
