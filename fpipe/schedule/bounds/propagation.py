"""Bounds by refutation: if a step took no longer than this, something would have no time left.

Each action gets a window: a head, before which it cannot start, and a tail, the least time from its
end to the end of the step. A makespan sets all deadlines. Three rules make windows narrower, until
nothing moves: an action waits for what it reads; a rank runs one action at a time (see
`one_machine`); and where its memory is full, a forward waits for as many weight gradients as must
be over. So what one rank cannot do in time moves the windows of all others. Where a window is
empty, no schedule is that short (a destructive bound: Klein and Scholl, European Journal of
Operational Research 112, 1999).

All rules hold backward in time as well: then heads are tails, weight gradients take memory and
forwards free it. Where nothing moves any more, half a window at a time is tried: if an action that
starts within it is refuted, it starts in the other half (shaving: Martin and Shmoys, Lecture Notes
in Computer Science 1084, 1996).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import product
from typing import Final

from fpipe.schedule.bounds.one_machine import later_heads
from fpipe.schedule.bounds.shop import Rank, Shop, make_shop
from fpipe.schedule.stage_costs import StageCosts

_LOOKS: Final = 150  # at actions, in half the time of a visit to a state


def refuted_bound(
    costs: StageCosts,
    placement: Sequence[int],
    memory: Sequence[float],
    sizes: Sequence[float],
    amounts: Sequence[float],
    *,
    best: float,
    effort: int,
) -> float:
    """A makespan that no schedule falls below, at least `best`.

    The costs are of a microbatch of size 1. Its times are multiplied by `sizes`, and what it keeps
    by `amounts`. The effort is in visits to states (see `lower_bound`).
    """
    actions = 3 * len(placement) * len(sizes)
    # A look at every pair of actions of a rank is the least that is of use.
    if not best or actions * actions > effort * _LOOKS * len(memory):
        return best
    shop = make_shop(costs, placement, memory, sizes, amounts, best)
    left = effort * _LOOKS

    def refuted(makespan: int, shaves: bool) -> bool:
        nonlocal left
        windows = Windows(shop, makespan, left)
        refutes = windows.empty() or (shaves and windows.shave())
        left = windows.left
        return refutes

    # The least makespan, in ticks, that may be; it is a whole number of them.
    least = first = int(best / shop.tick + 1e-6)
    for shaves in (False, True):
        step = 1
        while left > 0 and refuted(least + step - 1, shaves):
            least, step = least + step, 2 * step
        while left > 0 and step > 1:
            step //= 2
            if refuted(least + step - 1, shaves):
                least += step
    return best if least == first else max(best, least * shop.tick)


class Windows:
    """The windows of all actions, for one makespan.

    Attributes:
        shop: the actions.
        makespan: in ticks.
        left: how many actions may still be looked at.
        sides: heads and tails.
        stale: ranks and sides to look at.
    """

    def __init__(self, shop: Shop, makespan: int, left: int) -> None:
        self.shop, self.makespan, self.left = shop, makespan, left
        self.sides = ([0] * len(shop.times), [0] * len(shop.times))
        self.stale: set[tuple[int, int]] = set()

    def empty(self) -> bool:
        """Whether some window is empty, by all rules, so that no schedule takes so little time."""
        for side in (0, 1):
            self.left -= len(self.shop.times)
            for action in range(len(self.shop.times)):
                if not self._put_off(side, action, self.sides[side][action], force=True):
                    return True
        return not self._settle()

    def shave(self) -> bool:
        """Whether some window is empty, if halves of windows are cut off that refute themselves."""
        times, moves = self.shop.times, True
        while moves and self.left > 0:
            moves = False
            for action, side in product(range(len(times)), (0, 1)):
                heads, tails = self.sides[side], self.sides[1 - side]
                while self.left > 0:
                    latest = self.makespan - tails[action] - times[action]
                    middle = (heads[action] + latest) // 2
                    if heads[action] == latest or self._may_start(side, action, middle):
                        break
                    moves = True
                    if not (self._put_off(side, action, middle + 1) and self._settle()):
                        return True
        return False

    def _may_start(self, side: int, action: int, latest: int) -> bool:
        """Whether an action that starts by then, or ends after it, is not refuted."""
        trial = Windows(self.shop, self.makespan, self.left - len(self.shop.times))
        trial.sides = (self.sides[0].copy(), self.sides[1].copy())
        tail = self.makespan - latest - self.shop.times[action]
        may = trial._put_off(1 - side, action, tail) and trial._settle()
        self.left = trial.left
        return may

    def _settle(self) -> bool:
        """Apply the rules until nothing moves; False where a window is empty."""
        while self.stale and self.left > 0:
            rank, side = min(self.stale)
            self.stale.remove((rank, side))
            if not (self._wait_for_memory(rank, side) and self._take_turns(rank, side)):
                return False
        return True

    def _put_off(self, side: int, action: int, head: int, force: bool = False) -> bool:
        """Raise a head, or a tail, and of all that wait for it; False where no time is left."""
        heads, tails, shop = self.sides[side], self.sides[1 - side], self.shop
        if head <= heads[action] and not force:
            return True
        heads[action] = head
        todo = [action]
        while todo:
            action = todo.pop()
            end = heads[action] + shop.times[action]
            if end + tails[action] > self.makespan:
                return False
            self.stale.add((shop.rank_of[action], 0))
            self.stale.add((shop.rank_of[action], 1))
            for reader, delay in shop.readers[side][action]:
                if end + delay > heads[reader]:
                    heads[reader] = end + delay
                    todo.append(reader)
        return True

    def _take_turns(self, rank: int, side: int) -> bool:
        """Raise what follows from one action at a time; False where that cannot be."""
        heads, tails, times = self.sides[side], self.sides[1 - side], self.shop.times
        later = later_heads(
            [
                (heads[action], times[action], self.makespan - tails[action], action)
                for action in self.shop.ranks[side][rank].actions
            ]
        )
        self.left -= later.looks
        if later.heads is None:
            return False
        return all(self._put_off(side, action, head) for action, head in later.heads.items())

    def _wait_for_memory(self, rank: int, side: int) -> bool:
        """Raise what follows from the memory of a rank; False where there is not enough."""
        heads, tails, times = self.sides[side], self.sides[1 - side], self.shop.times
        here = self.shop.ranks[side][rank]
        latest = [
            [self.makespan - tails[action] - times[action] for action in chain.takes]
            for chain in here.chains
        ]
        for chain in here.chains:
            for nth, action in enumerate(chain.takes):
                end = heads[action] + times[action]
                need = -here.limit  # of memory that must be free before
                for other, starts in zip(here.chains, latest, strict=True):
                    count = bisect_left(starts, end)  # they cannot come after it
                    sooner = other.stage < chain.stage and other.alike == chain.alike and not side
                    if other is chain or sooner:
                        count = max(count, nth + 1)
                    need += count * other.much
                self.left -= len(latest)
                if need > 0:
                    free = self._free(here, chain.alike, nth, side, need)
                    if free is None or not self._put_off(side, action, free):
                        return False
        return True

    def _free(self, here: Rank, alike: int, nth: int, side: int, need: float) -> int | None:
        """When a rank can have so much memory free before it takes more for the nth microbatch of
        its kind; None if that cannot be."""
        heads, times = self.sides[side], self.shop.times
        lasts = []  # of each stage and kind, what is free last: when, and how many come before
        for chain in here.chains:
            for actions, much in chain.frees:
                # Younger ones of its kind are not even begun.
                count = nth if chain.alike == alike else len(actions)
                need -= count * much
                if count:
                    action = actions[count - 1]
                    lasts.append((heads[action] + times[action], count - 1, actions, much))
        while lasts:
            self.left -= len(lasts)
            last = max(lasts)
            time, before, actions, much = last
            need += much
            if need > 0:
                return time
            lasts.remove(last)
            if before:
                action = actions[before - 1]
                lasts.append((heads[action] + times[action], before - 1, actions, much))
        return None
