"""A list scheduler: a free rank runs the action that its policy prefers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate
from operator import add

from fpipe.schedule.bounds.states import FORWARD, GRADIENT, WEIGHT, needed_later
from fpipe.schedule.orders.problem import Order, Problem
from fpipe.schedule.simulation.link_queues import Queues

UNLIMITED = float("inf")


@dataclass(frozen=True)
class Policy:
    """How a rank chooses what to run next.

    Attributes:
        priorities: of F, of I and of W, per stage; the highest that can run goes first.
        windows: per stage, the most microbatches between F and I.
        patience: of F, of I and of W: how readily they wait for something more urgent that is
            known to arrive before they would end. 0 never waits; at 1 a wait may be as long as the
            delay that it avoids.
        pace: the least time between the starts of microbatches, as a share of the busiest
            rank's work on one. Scarce memory goes further when microbatches do not come in a bunch.
        bunch: microbatches that come together all the same, before a pause of as many paces; it
            suits memory that is handed on in turns.
        fused: run B, never I and W.
        turn: the microbatches in the order in which they are taken; None for the problem's.
    """

    priorities: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    windows: tuple[float, ...]
    patience: tuple[float, float, float]
    pace: float = 0.0
    bunch: int = 1
    fused: bool = False
    turn: tuple[int, ...] | None = None


def plain_policy(
    stages: int, patience: tuple[float, float, float] = (0, 0, 0), *, eager: bool = False
) -> Policy:
    """I before F, W where nothing else can run: 1F1B whose W's fill the gaps.

    Where `eager`, F goes before I instead, with 1F1B's limit on how far ahead a stage may be.
    """
    priorities = ((3.0 if eager else 1.0,) * stages, (2.0,) * stages, (0.0,) * stages)
    windows = tuple(float(stages - stage) if eager else UNLIMITED for stage in range(stages))
    return Policy(priorities, windows, patience)


def list_schedule(problem: Problem, policy: Policy, limit: float = UNLIMITED) -> Order | None:
    """Build an order by playing time forward, one decision at a time.

    Each stage takes its microbatches in the order of the policy's turn. Memory is never exceeded,
    and never runs into a dead end: on a rank of several stages, a forward is let in only if the
    oldest microbatch that lacks one can still take all of them afterwards (the banker's rule),
    because nothing of it is freed before. An I that hands on more than it frees, and finds no room
    for that, becomes a B, which only frees. About two microseconds per action.

    None where no rank can end before the limit, which is of makespans only.
    """
    placement, count, costs = problem.placement, problem.microbatches, problem.costs
    # From here on a microbatch is known by its place in the turn.
    turn = policy.turn or problem.turn
    size = [problem.sizes[microbatch] for microbatch in turn]
    amount = [problem.amounts[microbatch] for microbatch in turn]
    total = sum(size)
    stages_of, last = problem.stages, len(placement) - 1
    f, i, w, b, down, up = costs.f, costs.i, costs.w, costs.b, costs.down, costs.up
    # F keeps `kept`, I frees `freed` of it, and W frees the rest.
    kept, freed = costs.activation, costs.freed_by_i
    later = [has - frees for has, frees in zip(kept, freed, strict=True)]
    queues = Queues(costs.links) if costs.down_links else None
    prefer_f, prefer_i, prefer_w = policy.priorities
    windows, patience = policy.windows, policy.patience
    pace = policy.pace * problem.work * count / total

    # Per stage: how many of F and I are done, the places of those that still lack their W, and when
    # the inputs of F and I arrive, in order.
    done_f, done_i = [0] * len(placement), [0] * len(placement)
    late: list[deque[int]] = [deque() for _ in placement]
    inputs: list[list[float]] = [[] for _ in placement]
    gradients: list[list[float]] = [[] for _ in placement]
    before = list(accumulate(size, initial=0.0))
    held_before = list(accumulate(amount, initial=0.0))
    inputs[0] = [pace * before[k - k % policy.bunch] for k in range(count)]
    # Per rank: memory held, the share of it that waits for W alone, when it is free, when it means
    # to wake (never while it is busy), work and actions left, and its first start.
    held, owed = [0.0] * len(stages_of), [0.0] * len(stages_of)
    free, wake = [0.0] * len(stages_of), [UNLIMITED] * len(stages_of)
    backward = b if policy.fused else tuple(map(add, i, w))  # as planned
    left = [total * sum(f[s] + backward[s] for s in stages) for stages in stages_of]
    begun: list[float | None] = [None] * len(stages_of)
    todo = [count * len(stages) * 3 for stages in stages_of]
    rows: list[list[int]] = [[] for _ in stages_of]
    fused: set[int] = set()
    heap = [(0.0, rank) for rank in range(len(stages_of))]
    heapify(heap)
    slack = problem.slack
    while heap:
        now, rank = heappop(heap)
        if free[rank] > now or not todo[rank]:
            continue
        if now + left[rank] > limit:
            return None
        stages, memory = stages_of[rank], problem.memory[rank] * (1 + 1e-9)
        best, chosen, kind, duration = -UNLIMITED, -1, FORWARD, 0.0
        whole = False  # whether the gradient that is chosen is a B
        coming: list[tuple[float, float]] = []  # what will arrive, and how much it is wanted
        crowded = False  # a forward is there, and waits for memory that a W would free
        for stage in stages:
            took, returned = done_f[stage], done_i[stage]
            if returned < took and returned < len(gradients[stage]):
                arrival = gradients[stage][returned]
                if arrival > now:
                    coming.append((arrival, prefer_i[stage]))
                elif prefer_i[stage] > best:
                    best, chosen, kind = prefer_i[stage], stage, GRADIENT
                    whole = policy.fused or held[rank] - freed[stage] * amount[returned] > memory
                    duration = (b[stage] if whole else i[stage]) * size[returned]
            if late[stage] and prefer_w[stage] > best:
                best, chosen, kind = prefer_w[stage], stage, WEIGHT
                duration = w[stage] * size[late[stage][0]]
            if took - returned < windows[stage] and took < len(inputs[stage]):
                arrival = inputs[stage][took]
                need = held[rank] + kept[stage] * amount[took]
                if need - owed[rank] > memory or (
                    len(stages) > 1
                    and needed_later(stages, kept, done_f, stage, held_before) > memory
                ):
                    continue
                if need > memory:
                    crowded = crowded or arrival <= now
                elif arrival > now:
                    coming.append((arrival, prefer_f[stage]))
                elif prefer_f[stage] > best:
                    best, chosen, kind = prefer_f[stage], stage, FORWARD
                    duration = f[stage] * size[took]
        if crowded and kind != GRADIENT:
            for stage in stages:
                if late[stage] and later[stage] > 0:
                    best, chosen, kind = UNLIMITED, stage, WEIGHT
                    duration = w[stage] * size[late[stage][0]]
                    break
        if chosen >= 0 and coming:
            end, patient = now + duration - slack, patience[kind]
            for arrival, wanted in coming:
                if arrival < end and wanted > best and arrival - now < patient * (end - arrival):
                    chosen = -1
                    break
        if chosen < 0:
            wake[rank] = min(coming)[0] if coming else UNLIMITED
            if coming:
                heappush(heap, (wake[rank], rank))
            continue

        end = now + duration
        if begun[rank] is None:
            begun[rank] = now
        wake[rank] = -1.0
        left[rank] -= duration
        todo[rank] -= 1
        arrival, off, reader = end, end, rank
        if kind == FORWARD:
            place = done_f[chosen]
            done_f[chosen] += 1
            held[rank] += kept[chosen] * amount[place]
            if chosen < last:
                arrival, reader = end + down[chosen], placement[chosen + 1]
                if queues is not None:
                    off, arrival = queues.send(costs.down_links[chosen], end, amount[place])
                inputs[chosen + 1].append(arrival)
            else:
                gradients[chosen].append(end)
        elif kind == GRADIENT:
            place = done_i[chosen]
            done_i[chosen] += 1
            if whole:
                fused.add((chosen * 3 + kind) * count + turn[place])
                todo[rank] -= 1
                held[rank] -= kept[chosen] * amount[place]
                left[rank] -= backward[chosen] * size[place] - duration
            else:
                late[chosen].append(place)
                held[rank] -= freed[chosen] * amount[place]
                owed[rank] += later[chosen] * amount[place]
            if chosen:
                arrival, reader = end + up[chosen - 1], placement[chosen - 1]
                if queues is not None:
                    off, arrival = queues.send(costs.up_links[chosen - 1], end, amount[place])
                gradients[chosen - 1].append(arrival)
        else:
            place = late[chosen].popleft()
            held[rank] -= later[chosen] * amount[place]
            owed[rank] -= later[chosen] * amount[place]
        rows[rank].append((chosen * 3 + kind) * count + turn[place])
        free[rank] = off if costs.blocking else end
        heappush(heap, (free[rank], rank))
        if reader != rank and wake[reader] > arrival:
            wake[reader] = arrival
            heappush(heap, (arrival, reader))
    if any(todo):
        return None
    if problem.simulated:
        return problem.played(Order(UNLIMITED, rows, frozenset(fused)))
    if problem.objective == "span":
        value = max(end - (first or 0.0) for end, first in zip(free, begun, strict=True))
    else:
        value = max(free)
    return Order(value, rows, frozenset(fused))
