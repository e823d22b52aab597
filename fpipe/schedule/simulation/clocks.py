"""The clock of each rank as it runs its row: when every action starts and ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple

from fpipe.schedule.action import Action, Op
from fpipe.schedule.simulation.link_queues import Link, Queues
from fpipe.schedule.stage_costs import StageCosts


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

    Args:
        rows: the actions of each rank.
        costs: for a microbatch of size 1.
        sizes: of the microbatches.
        times: how long each action of each row takes, where that is not what the costs say.
    """
    if not costs.shared or costs.pair is None:
        return _run(rows, costs, sizes, times)
    # Which actions run together does not depend on times. Messages of ranks that share a link are
    # sent in the order of time, so that has to be known before.
    pairs = _run(rows, replace(costs, shared=False), sizes, times).pairs
    return _run(rows, costs, sizes, times, frozenset(pairs))


def _run(
    rows: Sequence[Sequence[Action]],
    costs: StageCosts,
    sizes: Sequence[float],
    times: Sequence[Sequence[float]] | None,
    together: Collection[tuple[int, int]] | None = None,
) -> Times:
    """The same, with the places of the F's that run together; None to find them."""
    microbatches = len(sizes)
    amounts = costs.memory_sizes or (1,) * microbatches  # by which messages are multiplied
    beside = costs.collective_lane
    # Per rank, when its last action ended, and its last collective; per stage, when what it has
    # gathered is there, and when its gradients are reduced.
    clocks, lanes = [0.0] * len(rows), [0.0] * len(rows)
    gathered, reduced = [0.0] * len(costs.f), [0.0] * len(costs.f)
    f, i, w, b, down, up = costs.f, costs.i, costs.w, costs.b, costs.down, costs.up
    last = len(f) - 1
    # Per stage and microbatch, at stage * microbatches + microbatch: how far its work is (1 after
    # F, 2 after I, 3 after W or B), and when its output arrives at the reader.
    state = bytearray(len(f) * microbatches)
    forward: list[float | None] = [None] * len(state)
    backward: list[float | None] = [None] * len(state)
    pair = costs.pair
    # Ranks whose next two actions wait to start together, and those that do not.
    paused: dict[int, int] = {}
    apart: set[tuple[int, int]] = set()
    pairs: list[tuple[int, int]] = []
    waiting: dict[int, int] = {}  # what a blocked rank waits for; backwards are negative
    starts: list[list[float]] = [[] for _ in rows]
    ends: list[list[float]] = [[] for _ in rows]
    ready = list(range(len(rows)))[::-1]
    queues = Queues(costs.links) if costs.down_links else None
    # Messages on links that ranks share: when each is made, by which rank, at which place of its
    # row, what it is (as in `waiting`), its way and its size. And those that their rank waits for.
    unsent: list[tuple[float, int, int, int, Link, float]] = []
    blocked, pauses = [0] * len(rows), costs.shared and costs.blocking

    def send(rank: int, at: int, key: int, link: Link, made: float, size: float) -> float:
        """Send an output; return when its rank may go on."""
        assert queues is not None
        if costs.shared and link.transfer:
            heappush(unsent, (made, rank, at, key, link, size))
            blocked[rank] += costs.blocking
            return made
        off, arrival = queues.send(link, made, size)
        arrive(key, arrival)
        return off if costs.blocking else made

    def arrive(key: int, arrival: float) -> None:
        if key >= 0:
            forward[key] = arrival
        else:
            backward[-1 - key] = arrival
        if (reader := waiting.pop(key, None)) is not None:
            ready.append(reader)

    while ready or unsent or paused:
        if not ready and unsent:
            # No rank can go on without these, so none will be made before the first.
            end, rank, _, key, link, size = heappop(unsent)
            assert queues is not None
            off, there = queues.send(link, end, size)
            arrive(key, there)
            if costs.blocking:
                clocks[rank] = max(clocks[rank], off)
                blocked[rank] -= 1
                if not blocked[rank]:
                    ready.append(rank)
            continue
        if not ready:
            # All ranks wait: the first of these pairs runs one after the other.
            rank = min(paused)
            apart.add((rank, len(ends[rank])))
            del waiting[paused[rank]]
            ready.append(rank)
        rank = ready.pop()
        paused.pop(rank, None)  # its input may have come
        row, start_at, end_at = rows[rank], starts[rank], ends[rank]
        now = clocks[rank]
        both: tuple[float, float] | None = None  # the times of a pair whose B comes next
        for at in range(len(end_at), len(row)):
            stage, op, microbatch = row[at]
            if microbatch is None:
                begin = end = now
                if op == Op.UNSHARD:
                    begin = max(now, lanes[rank])
                    end = begin + (costs.unshard[stage] if times is None else times[rank][at])
                    lanes[rank] = gathered[stage] = end
                elif op == Op.REDUCE_GRAD:
                    now = max(now, reduced[stage])
                    begin = max(now, lanes[rank])
                    end = begin + (costs.reduce_grad[stage] if times is None else times[rank][at])
                    lanes[rank] = reduced[stage] = end
                elif op == Op.UPDATE:
                    begin = max(now, reduced[stage])
                    end = begin + (costs.update[stage] if times is None else times[rank][at])
                start_at.append(begin)
                end_at.append(end)
                if not beside or op == Op.UPDATE:
                    now = end
                continue
            if gathered[stage] > now:
                now = gathered[stage]
            key = stage * microbatches + microbatch
            done = state[key]
            if op == Op.F:
                if done:
                    break
                if stage:
                    arrival = forward[key - microbatches]
                    if arrival is None:
                        waiting[key - microbatches] = rank
                        break
                    if arrival > now:
                        now = arrival
                takes = f[stage] * sizes[microbatch] if times is None else times[rank][at]
                end = now + takes
                if pair is not None and (
                    (rank, at) not in apart if together is None else (rank, at) in together
                ):
                    partner = partner_of(row, at)
                    other, _, number = partner or (0, Op.B, None)
                    if number is not None and state[other * microbatches + number] == 1:
                        behind = other * microbatches + number
                        arrival = backward[behind + microbatches] if other < last else 0.0
                        if arrival is None:
                            paused[rank] = -1 - behind - microbatches
                            waiting[paused[rank]] = rank
                            break
                        now = max(now, arrival, gathered[other])
                        takes += b[other] * sizes[number] if times is None else times[rank][at + 1]
                        end = now + pair * takes
                        both = (now, end)
                        pairs.append((rank, at))
                state[key] = 1
                begin, free = now, end
                if stage < last:
                    if queues is not None:
                        link = costs.down_links[stage]
                        free = send(rank, at, key, link, end, amounts[microbatch])
                    else:
                        forward[key] = end + down[stage]
                        if (reader := waiting.pop(key, None)) is not None:
                            ready.append(reader)
            elif op == Op.W and done == 2:
                begin = now
                free = end = now + (
                    w[stage] * sizes[microbatch] if times is None else times[rank][at]
                )
                state[key] = 3
            else:
                if done != 1 or op not in (Op.I, Op.B, Op.W):
                    break
                if stage < last:
                    arrival = backward[key + microbatches]
                    if arrival is None:
                        waiting[-1 - key - microbatches] = rank
                        break
                    if arrival > now:
                        now = arrival
                # A W here is of a stage that owes no I.
                time = i[stage] if op == Op.I else b[stage] if op == Op.B else w[stage]
                begin = now
                free = end = now + (time * sizes[microbatch] if times is None else times[rank][at])
                state[key] = 2 if op == Op.I else 3
                if both is not None:
                    (begin, end), both = both, None
                    free = end
                if stage and op != Op.W:
                    if queues is not None:
                        link = costs.up_links[stage - 1]
                        free = send(rank, at, -1 - key, link, end, amounts[microbatch])
                    else:
                        backward[key] = end + up[stage - 1]
                        if (reader := waiting.pop(-1 - key, None)) is not None:
                            ready.append(reader)
            start_at.append(begin)
            end_at.append(end)
            if free > now:
                now = free
            if pauses and blocked[rank] and both is None:
                break
        clocks[rank] = now
    whole = microbatches > 0 and all(
        len(row) == len(done_at) for row, done_at in zip(rows, ends, strict=True)
    )
    # Every stage has done the same work on every microbatch, and some.
    for at in range(0, len(state), max(1, microbatches)):
        done = state[at]
        whole = whole and done > 0 and state.count(done, at, at + microbatches) == microbatches
    return Times(starts, ends, whole, pairs)


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
