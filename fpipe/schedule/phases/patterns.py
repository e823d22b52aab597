"""Patterns: every microbatch does the same, one period after the other (modulo scheduling).

A pattern says when a microbatch does what, from its first forward on; the next microbatch does the
same a period later. On a rank, the actions of a pattern must not overlap modulo the period, which
can be no less than the rank's work on a microbatch; and the longer activations live, as a multiple
of the period, the more memory they take. "Pipeline Parallelism with Controllable Memory" (Qi et
al., https://arxiv.org/abs/2405.15362) builds V-Min and V-Half by hand from such blocks. This module
builds them for any costs and memory, on placements whose every pass goes along all ranks, up or
down.

A rank and its neighbour fit together or not, whatever the others do. So patterns grow rank by rank,
all passes at once, and a beam keeps those in which the microbatch waits least between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import nsmallest
from random import Random
from typing import Final, NamedTuple

from fpipe.schedule.bounds.states import FORWARD, GRADIENT, WEIGHT
from fpipe.schedule.orders.evaluator import Evaluator, make_evaluator
from fpipe.schedule.orders.problem import LARGE, Candidate, Order, Problem
from fpipe.schedule.phases.portfolio import Phase, Step

_WORK: Final = 720_720  # ticks in the work of the busiest rank; most small numbers divide it
_SLACKS: Final = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.45)  # of periods beyond the work of a rank
_HOLES: Final = (math.inf, 64, 48, 40, 32, 30, 28, 26, 24, 22, 20, *range(18, 0, -1))
_LEAST: Final = 2  # microbatches per rank: where there are fewer, nothing is steady
_TRIED: Final = 2  # microbatches per rank that are tried out
_WHOLE: Final = (0.02, 0.1, 0.45)  # after which the best pattern is repeated in full
_TRIAL: Final = 0.1  # of a trial, in what it takes to play a policy
_ROUNDS: Final = 4  # in each of which every period is tried
_BETTER: Final = 0.999  # how much better a pattern promises to be, to be unrolled in full
_BEGUN: Final = 4  # times as many ways to begin
_WIDTH: Final = 48  # patterns that are kept after each rank, where it has two stages
_WAYS: Final = 12  # to go on from one rank to the next, from each of them
_ENDS: Final = 48  # whole patterns whose memory is counted
_COST: Final = 2.0  # of placing an action, in what it takes to schedule one


class Pattern(NamedTuple):
    """When a microbatch does what, in ticks (see `_ticks`).

    Attributes:
        period: from one microbatch to the next.
        starts: of F, I and W of each stage, in the order of their numbers (stage * 3 + kind).
        excess: by how much it exceeds the memory of a rank, at most, as a share of that.
    """

    period: int
    starts: tuple[int, ...]
    excess: float


class _Pass(NamedTuple):
    """A pass of a microbatch along all ranks: stages by rank, F or I, up the ranks or down."""

    stages: tuple[int, ...]
    kind: int
    up: bool


class _Grown(NamedTuple):
    """A pattern of the last ranks.

    Attributes:
        waits: between ranks, in all.
        places: of the passes on the first of these ranks, modulo the period.
        later: the pattern without that rank.
    """

    waits: int
    places: tuple[int, ...]
    later: _Grown | None


def patterns(problem: Problem, random: Random) -> Phase:
    """Search patterns of short periods that fit the memory.

    A pattern that does not quite fit is repeated with holes: now and then a microbatch is left out
    and the others come that much later, so fewer are there at a time.
    """
    passes = _passes(problem)
    if passes is None or problem.microbatches < _LEAST * problem.ranks:
        return
    small = problem.resized(min(problem.microbatches, _TRIED * problem.ranks))
    evaluator, trial = make_evaluator(problem), make_evaluator(small)
    more = problem.microbatches - small.microbatches
    best = math.inf
    for _ in range(_ROUNDS):
        chosen: tuple[Pattern, float] | None = None
        for slack in _SLACKS:
            if problem.work * (1 + slack) * problem.microbatches < best:
                ticks = round(_WORK * (1 + slack))
                pattern = yield from _sweep(problem, passes, ticks, random)
                for hole in _HOLES:
                    if pattern.excess > 0 and hole * pattern.excess > 2:
                        continue  # which leaves out too few
                    order = unrolled(trial, pattern, hole)
                    yield Step(_TRIAL * small.actions / LARGE)
                    if order is not None:
                        period = problem.work * pattern.period / _WORK * (1 + 1 / hole)
                        value = order.value + more * period
                        if value < best * _BETTER:
                            best, chosen = value, (pattern, hole)
                        break
            if chosen is not None and slack in _WHOLE:
                order = unrolled(evaluator, *chosen)
                yield Step(problem.scale, None if order is None else Candidate(problem, order))
                chosen = None


def unrolled(evaluator: Evaluator, pattern: Pattern, hole: float) -> Order | None:
    """The order that repeats a pattern for all microbatches, or None if it does not fit the memory.

    After as many microbatches as `hole` says, one is left out.
    """
    problem = evaluator.problem
    count, period = problem.microbatches, pattern.period
    begins = [period * (k + int(k // hole)) for k in range(count)]
    rows: list[list[int]] = []
    for stages in problem.stages:
        timed = [
            (pattern.starts[number] + begin, number * count + microbatch)
            for stage in stages
            for number in range(3 * stage, 3 * stage + 3)
            for microbatch, begin in enumerate(begins)
        ]
        rows.append([action for _, action in sorted(timed)])
    order = Order(math.inf, rows, frozenset())
    if not evaluator.fits_all(order):
        return None
    value, _ = evaluator.times(rows, order.fused)
    return replace(order, value=value)


def _passes(problem: Problem) -> list[_Pass] | None:
    """The passes of a microbatch in their order, or None where they are not along all ranks."""
    ranks, placement = problem.ranks, problem.placement
    if ranks < 2 or len(placement) % ranks or problem.uneven or problem.fuses or not problem.work:
        return None
    forwards = []
    for first in range(0, len(placement), ranks):
        way = placement[first : first + ranks]
        if way not in (tuple(range(ranks)), tuple(reversed(range(ranks)))):
            return None
        stages = sorted(range(first, first + ranks), key=placement.__getitem__)
        forwards.append(_Pass(tuple(stages), FORWARD, up=way[0] == 0))
    backwards = [_Pass(each.stages, GRADIENT, not each.up) for each in reversed(forwards)]
    return [*forwards, *backwards]


def _sweep(
    problem: Problem, passes: Sequence[_Pass], period: int, random: Random
) -> Generator[Step, None, Pattern]:
    """Grow patterns from the last rank to the first; the best exceeds the memory least."""
    ticks, ranks = _ticks(problem), problem.ranks
    times = ticks.times
    price = _COST / min(problem.actions, LARGE)
    width = max(8, 4 * _WIDTH // len(passes) ** 2 * 4)  # it takes longer to place many

    def durations(rank: int) -> list[int]:
        return [times[each.kind][each.stages[rank]] for each in passes]

    def weights(rank: int) -> list[int]:
        return [times[WEIGHT][stage] for stage in problem.stages[rank]]

    # Ticks are rounded.
    period = max(period, *(sum(durations(rank) + weights(rank)) for rank in range(ranks)))
    grown = []
    for _ in range(_BEGUN * width):
        grown.append(_begun(passes, durations(ranks - 1), weights(ranks - 1), period, random))
    known: dict[tuple[object, ...], list[_Grown]] = {}
    for rank in reversed(range(ranks - 1)):
        here, there = durations(rank), durations(rank + 1)
        hops = [
            (ticks.down if each.kind == FORWARD else ticks.up)[
                min(each.stages[rank], each.stages[rank + 1])
            ]
            for each in passes
        ]
        placed = 0
        following: dict[tuple[int, ...], _Grown] = {}
        for one in grown:
            base = one.places[0]
            key = (
                tuple((place - base) % period for place in one.places),
                *here,
                *there,
                *hops,
            )
            if key not in known:
                # From which place on, and in which direction, each pass looks for room.
                targets = [
                    (place - time - hop, -1) if each.up else (place + taken + hop, 1)
                    for each, place, time, taken, hop in zip(
                        passes, one.places, here, there, hops, strict=True
                    )
                ]
                targets = [(target - base, sign) for target, sign in targets]
                known[key] = list(_ways(targets, here, weights(rank), period, random))
                placed += _WAYS * len(passes)
            for way in known[key]:
                places = tuple((place + base) % period for place in way.places)
                added = _Grown(one.waits + way.waits, places, one)
                same = tuple((place - places[0]) % period for place in places)
                if same not in following or added.waits < following[same].waits:
                    following[same] = added
        grown = nsmallest(width, following.values(), key=lambda one: (one.waits, one.places))
        yield Step(price * (placed + width))
    complete = [_whole(problem, passes, one, period) for one in grown[:_ENDS]]
    yield Step(price * len(passes) * ranks * len(complete))
    return min(complete, key=lambda one: one.excess)


def _begun(
    passes: Sequence[_Pass],
    durations: Sequence[int],
    weights: Sequence[int],
    period: int,
    random: Random,
) -> _Grown:
    """A pattern of the last rank: a pass that comes back at once waits little, others at random."""
    ring = _Ring(period, [*durations, *weights])
    places: list[int] = []
    waits = 0
    for nth, each in enumerate(passes):
        turns = nth > 0 and passes[nth - 1].up and not each.up
        ready = places[-1] + durations[nth - 1] if turns else random.randrange(period)
        wait = ring.put(ready, durations[nth], 1, skip=random.random() < 0.3)
        places.append((ready + wait) % period)
        waits += wait if turns else 0
    return _Grown(waits, tuple(places), None)


def _ways(
    targets: Sequence[tuple[int, int]],
    durations: Sequence[int],
    weights: Sequence[int],
    period: int,
    random: Random,
) -> Iterator[_Grown]:
    """Ways to place the passes on a rank next to their places on another, which differ in who comes
    first."""
    numbers = list(range(len(targets)))
    for nth in range(_WAYS):
        ring = _Ring(period, [*durations, *weights])
        places = [0] * len(targets)
        waits = 0
        for number in numbers:
            target, sign = targets[number]
            wait = ring.put(target, durations[number], sign, skip=nth > 0 and random.random() < 0.1)
            places[number] = (target + sign * wait) % period
            waits += wait
        yield _Grown(waits, tuple(places), None)
        random.shuffle(numbers)


def _whole(problem: Problem, passes: Sequence[_Pass], grown: _Grown, period: int) -> Pattern:
    """The whole pattern, with its W's and its excess."""
    ticks, placement = _ticks(problem), problem.placement
    times = ticks.times
    places: list[tuple[int, ...]] = []
    one: _Grown | None = grown
    while one is not None:
        places.append(one.places)
        one = one.later
    starts = [0] * (3 * len(placement))
    ready = places[0][0]
    for nth, each in enumerate(passes):
        for rank in range(problem.ranks) if each.up else reversed(range(problem.ranks)):
            stage = each.stages[rank]
            start = ready + (places[rank][nth] - ready) % period
            starts[3 * stage + each.kind] = start
            ready = start + times[each.kind][stage]
            if each.kind == FORWARD:
                ready += ticks.down[stage] if stage < len(placement) - 1 else 0
            else:
                ready += ticks.up[stage - 1] if stage else 0
    excess = -math.inf
    for rank, stages in enumerate(problem.stages):
        peaks = []
        # Either the W's of the stages whose I's come last, or those of the others, choose first.
        for last in (True, False):
            ring = _Ring(period, [row[stage] for stage in stages for row in times])
            for stage in stages:
                for kind in (FORWARD, GRADIENT):
                    ring.put(starts[3 * stage + kind], times[kind][stage], 1)
            ends = {
                stage: starts[3 * stage + GRADIENT] + times[GRADIENT][stage] for stage in stages
            }
            for end, stage in sorted(((end, stage) for stage, end in ends.items()), reverse=last):
                wait = ring.put(end, times[WEIGHT][stage], 1)
                starts[3 * stage + WEIGHT] = end + wait
            placed = [starts[3 * stage + WEIGHT] for stage in stages]
            peaks.append((_peak(problem, times, stages, starts, period), placed))
        peak, placed = min(peaks)
        for stage, start in zip(stages, placed, strict=True):
            starts[3 * stage + WEIGHT] = start
        excess = max(excess, peak / problem.memory[rank] - 1 - 1e-9)
    return Pattern(period, tuple(starts), excess)


class _Ticks(NamedTuple):
    """Times of F, I and W and latencies of each stage, as integers, so that equal times are equal
    and sums are exact. The work of the busiest rank is `_WORK` ticks."""

    times: tuple[tuple[int, ...], ...]
    down: tuple[int, ...]
    up: tuple[int, ...]


def _ticks(problem: Problem) -> _Ticks:
    def counted(times: Sequence[float]) -> tuple[int, ...]:
        return tuple(int(time / problem.work * _WORK + 1e-3) for time in times)

    costs = problem.costs
    times = (counted(costs.f), counted(costs.i), counted(costs.w))
    return _Ticks(times, counted(costs.down), counted(costs.up))


def _peak(
    problem: Problem,
    times: Sequence[Sequence[int]],
    stages: Sequence[int],
    starts: Sequence[int],
    period: int,
) -> float:
    """The most that a rank holds in the steady state."""
    held: list[tuple[int, int, float]] = []  # from when until when, and how much
    for stage in stages:
        begin, gradient, weight = starts[3 * stage : 3 * stage + 3]
        freed, kept = problem.costs.freed_by_i[stage], problem.costs.activation[stage]
        held.append((begin, gradient + times[GRADIENT][stage], freed))
        held.append((begin, weight + times[WEIGHT][stage], kept - freed))
    return max(
        # Microbatches that have begun by now, and not ended.
        sum(((at - begin) // period - (at - end) // period) * much for begin, end, much in held)
        for at in (starts[3 * stage] for stage in stages)
    )


class _Ring:
    """The time of a rank modulo the period: its gaps, and the actions that they must still hold."""

    def __init__(self, period: int, durations: Sequence[int]) -> None:
        self.period = period
        self.gaps: list[tuple[int, int]] = []  # start and length, once anything is taken
        self.left = sorted(filter(None, durations))

    def put(self, ready: int, duration: int, sign: int, skip: bool = False) -> int:
        """Place an action next to `ready`, so that there is room left for all others.

        It starts no earlier than that where the sign is 1, and no later where it is -1. With `skip`
        it takes the next place but one, where there is another. Returns how far from `ready` it
        starts.
        """
        if not duration:
            return 0
        self.left.remove(duration)
        period = self.period
        if not self.gaps:
            self.gaps = [((ready + duration) % period, period - duration)]
            return 0
        left = tuple(self.left)
        places: set[tuple[int, int, int]] = set()
        for nth, (begin, length) in enumerate(self.gaps):
            room = length - duration
            if room < 0:
                continue
            inside = (ready - begin) % period  # how far into the gap `ready` is
            if inside <= room:
                places.add((0, nth, inside))
            for total in _sums(left):
                if total <= room:
                    for at in (total, room - total):
                        places.add((sign * (begin + at - ready) % period, nth, at))
        chosen: tuple[int, list[tuple[int, int]]] | None = None
        for wait, nth, at in sorted(places):
            if chosen is not None and wait == chosen[0]:
                continue
            begin, length = self.gaps[nth]
            rest = ((begin, at), ((begin + at + duration) % period, length - at - duration))
            gaps = [gap for gap in rest if gap[1]] + self.gaps[:nth] + self.gaps[nth + 1 :]
            if _fits(tuple(sorted(length for _, length in gaps)), left):
                chosen = wait, gaps
                if not skip:
                    break
                skip = False
        assert chosen is not None, "what is left fits the gaps, this action among it"
        wait, self.gaps = chosen
        return wait


@lru_cache(maxsize=4096)
def _sums(durations: tuple[int, ...]) -> tuple[int, ...]:
    """The sums of subsets of the durations, up to about a hundred."""
    sums = {0}
    for duration in durations:
        if len(sums) < 64:
            sums |= {total + duration for total in sums}
    return tuple(sorted(sums))


@lru_cache(maxsize=65_536)
def _fits(gaps: tuple[int, ...], durations: tuple[int, ...]) -> bool:
    """Whether actions of these durations fit the gaps; both rise."""
    if not durations:
        return True
    longest, rest = durations[-1], durations[:-1]
    for nth, gap in enumerate(gaps):
        if gap >= longest and (nth == 0 or gap != gaps[nth - 1]):
            left = (*gaps[:nth], gap - longest, *gaps[nth + 1 :])
            if _fits(tuple(sorted(left)), rest):
                return True
    return False
