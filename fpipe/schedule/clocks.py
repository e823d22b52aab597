"""The clock of each rank as it runs its row: when every action starts and ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fpipe.schedule.action import Action, Op
from fpipe.schedule.link_queues import Queues
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


def run_rows(rows: Sequence[Sequence[Action]], costs: StageCosts, sizes: Sequence[float]) -> Times:
    """Starts and ends of the actions of each row, in its order.

    A row ends early at an action whose input never comes, or that is repeated or out of order.
    `costs` are for a microbatch of size 1.
    """
    microbatches = len(sizes)
    beside = costs.collective_lane
    # Per rank, when its last action ended, and its last collective; per stage, when what it has
    # gathered is there, and when its gradients are reduced.
    clocks, lanes = [0.0] * len(rows), [0.0] * len(rows)
    gathered, reduced = [0.0] * len(costs.f), [0.0] * len(costs.f)
    f, i, w, b, down, up = costs.f, costs.i, costs.w, costs.b, costs.down, costs.up
    queues = Queues(costs.links) if costs.down_links else None
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
    shared: tuple[float, float] | None = None  # the times of a pair whose B comes next
    waiting: dict[int, int] = {}  # what a blocked rank waits for; backwards are negative
    starts: list[list[float]] = [[] for _ in rows]
    ends: list[list[float]] = [[] for _ in rows]
    ready = list(range(len(rows)))[::-1]
    while ready or paused:
        if not ready:
            # All ranks wait: the first of these pairs runs one after the other.
            rank = min(paused)
            apart.add((rank, len(ends[rank])))
            del waiting[paused[rank]]
            ready.append(rank)
        rank = ready.pop()
        paused.pop(rank, None)  # its input may have come
        row, start_at, end_at = rows[rank], starts[rank], ends[rank]
        now, shared = clocks[rank], None
        for at in range(len(end_at), len(row)):
            stage, op, microbatch = row[at]
            if microbatch is None:
                begin = end = now
                if op == Op.UNSHARD:
                    begin = max(now, lanes[rank])
                    end = lanes[rank] = gathered[stage] = begin + costs.unshard[stage]
                elif op == Op.REDUCE_GRAD:
                    now = max(now, reduced[stage])
                    begin = max(now, lanes[rank])
                    end = lanes[rank] = reduced[stage] = begin + costs.reduce_grad[stage]
                elif op == Op.UPDATE:
                    begin = max(now, reduced[stage])
                    end = begin + costs.update[stage]
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
                end = now + f[stage] * sizes[microbatch]
                if pair is not None and (rank, at) not in apart:
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
                        both = f[stage] * sizes[microbatch] + b[other] * sizes[number]
                        end = now + pair * both
                        shared = (now, end)
                        pairs.append((rank, at))
                state[key] = 1
                if stage < last:
                    forward[key] = (
                        end + down[stage]
                        if queues is None
                        else queues.send(costs.down_links[stage], end, sizes[microbatch])
                    )
                    if (reader := waiting.pop(key, None)) is not None:
                        ready.append(reader)
            elif op == Op.W and done == 2:
                end = now + w[stage] * sizes[microbatch]
                state[key] = 3
            else:
                if done != 1:
                    break
                if stage < last:
                    arrival = backward[key + microbatches]
                    if arrival is None:
                        waiting[-1 - key - microbatches] = rank
                        break
                    if arrival > now:
                        now = arrival
                if op == Op.I:
                    end = now + i[stage] * sizes[microbatch]
                    state[key] = 2
                elif op == Op.B:
                    end = now + b[stage] * sizes[microbatch]
                    if shared is not None:
                        (now, end), shared = shared, None
                    state[key] = 3
                elif op == Op.W:  # of a stage that owes no I
                    end = now + w[stage] * sizes[microbatch]
                    state[key] = 3
                else:
                    break
                if stage and op != Op.W:
                    backward[key] = (
                        end + up[stage - 1]
                        if queues is None
                        else queues.send(costs.up_links[stage - 1], end, sizes[microbatch])
                    )
                    if (reader := waiting.pop(-1 - key, None)) is not None:
                        ready.append(reader)
            start_at.append(now)
            end_at.append(end)
            now = end
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
