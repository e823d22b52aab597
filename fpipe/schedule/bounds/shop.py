"""All actions of a step as a job shop: their times, what they wait for, and what they keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from fpipe.schedule.bounds.states import FORWARD, GRADIENT, WEIGHT
from fpipe.schedule.placements import stages_by_rank
from fpipe.schedule.stage_costs import StageCosts

_PARTS: Final = (1, 2, 3, 4, 5, 8, 10, 20, 50, 100, 200, 1000)  # ticks of a unit of time
_FINE: Final = 1 << 20  # ticks of the makespan, where none of those does
_CLOSE: Final = 1e-9


class Chain(NamedTuple):
    """Activations that a stage keeps, of microbatches that are alike, in the order of their F.

    Attributes:
        stage: its number.
        alike: which microbatches.
        much: what it keeps of each.
        takes: the actions from which on it is kept.
        frees: the actions at whose end a part of it is free, and the part.
    """

    stage: int
    alike: int
    much: float
    takes: tuple[int, ...]
    frees: tuple[tuple[tuple[int, ...], float], ...]


class Rank(NamedTuple):
    """A rank in one direction of time.

    Attributes:
        actions: the numbers of those that take time.
        limit: its memory.
        chains: what it keeps; none where the memory is enough for all.
    """

    actions: tuple[int, ...]
    limit: float
    chains: tuple[Chain, ...]


class Shop(NamedTuple):
    """All actions of a step, in ticks. An action is (stage * 3 + kind) * microbatches + microbatch.

    Pairs are of both directions of time, forward and backward.

    Attributes:
        tick: its length, in the unit of the costs.
        times: of the actions.
        readers: of each action, those that wait for it, and the delay from its end; and the other
            way round.
        ranks: each with its actions.
        rank_of: each action's.
    """

    tick: float
    times: list[int]
    readers: tuple[list[list[tuple[int, int]]], list[list[tuple[int, int]]]]
    ranks: tuple[list[Rank], list[Rank]]
    rank_of: list[int]


def make_shop(
    costs: StageCosts,
    placement: Sequence[int],
    memory: Sequence[float],
    sizes: Sequence[float],
    amounts: Sequence[float],
    best: float,
) -> Shop:
    """Lay out all actions. A backward is an I, as short as an I or a B, and a W of what is left of
    the shorter of B and I and W; so no schedule is lost.

    Equal microbatches are alike, so only schedules matter in which each stage takes them in order.
    """
    count, stages_of = len(sizes), stages_by_rank(placement)
    hand = costs.gradient
    rest = [full - time for full, time in zip(costs.backward, hand, strict=True)]
    spent = [
        time * size
        for each in zip(costs.f, hand, rest, strict=True)
        for time in each
        for size in sizes
    ]
    tick, exact = _tick([*spent, *costs.down, *costs.up], best)

    def ticks(time: float) -> int:
        return round(time / tick) if exact else int(time / tick)

    times = list(map(ticks, spent))
    readers: list[list[tuple[int, int]]] = [[] for _ in times]
    writers: list[list[tuple[int, int]]] = [[] for _ in times]
    for first, second, delay in _waits(costs, list(zip(sizes, amounts, strict=True))):
        readers[first].append((second, ticks(delay)))
        writers[second].append((first, ticks(delay)))

    def ranks(backward: bool) -> list[Rank]:
        laid: list[Rank] = []
        for stages, limit in zip(stages_of, memory, strict=True):
            numbers = (
                at for s in stages for at in range(3 * s * count, 3 * (s + 1) * count) if times[at]
            )
            chains = _chains(costs, stages, sizes, amounts, backward)
            if sum(chain.much * len(chain.takes) for chain in chains) <= limit:
                chains = ()
            laid.append(Rank(tuple(numbers), limit * (1 + _CLOSE), chains))
        return laid

    rank_of = [rank for rank in placement for _ in range(3 * count)]
    return Shop(tick, times, (readers, writers), (ranks(False), ranks(True)), rank_of)


def _tick(times: Sequence[float], best: float) -> tuple[float, bool]:
    """A tick of which all times are whole numbers; or a small one, and False."""
    least = min(filter(None, times), default=1.0)
    for unit in (1.0, least):
        for parts in _PARTS:
            wholes = (time / unit * parts for time in times)
            if all(abs(whole - round(whole)) <= _CLOSE * whole for whole in wholes):
                return unit / parts, True
    return best / _FINE, False


def _waits(
    costs: StageCosts, microbatches: Sequence[tuple[float, float]]
) -> Iterator[tuple[int, int, float]]:
    """All pairs of actions of which one waits for the other, and the delay in between."""
    count, last = len(microbatches), len(costs.f) - 1
    before: dict[tuple[float, float], int] = {}  # the last microbatch of each kind
    for k, kind in enumerate(microbatches):
        for stage in range(last + 1):
            f, i, w = ((3 * stage + each) * count + k for each in (FORWARD, GRADIENT, WEIGHT))
            if stage < last:
                yield f, f + 3 * count, costs.down[stage]
                yield i + 3 * count, i, costs.up[stage]
            else:
                yield f, i, 0.0
            yield i, w, 0.0
            if kind in before:
                for action in (f, i, w):
                    yield action + before[kind] - k, action, 0.0
        before[kind] = k


def _chains(
    costs: StageCosts,
    stages: Sequence[int],
    sizes: Sequence[float],
    amounts: Sequence[float],
    backward: bool,
) -> tuple[Chain, ...]:
    """The activations that a rank keeps; backward in time, what it holds between I and W."""
    count = len(sizes)
    alike: dict[tuple[float, float], list[int]] = {}
    for k, kind in enumerate(zip(sizes, amounts, strict=True)):
        alike.setdefault(kind, []).append(k)
    chains = []
    for stage in stages:
        for nth, ((_, amount), numbers) in enumerate(alike.items()):
            f, i, w = (
                tuple((3 * stage + kind) * count + k for k in numbers)
                for kind in (FORWARD, GRADIENT, WEIGHT)
            )
            # Where I leaves W more than F kept, B may run in its place.
            much = costs.activation[stage] * amount
            late = min(costs.deferred[stage] * amount, much)
            if backward:
                chains.append(Chain(stage, nth, late, w[::-1], ((f[::-1], late),)))
            else:
                frees = tuple(each for each in ((w, late), (i, much - late)) if each[1] > 0)
                chains.append(Chain(stage, nth, much, f, frees))
    return tuple(chain for chain in chains if chain.much)
