"""Measure latency and bandwidth between the ranks of a group, by a pipeline that only hands on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.entry import pipeline
from fpipe.recording import record
from fpipe.schedule import Action, Op
from fpipe.schedule.families.evaluation import all_forwards_first
from fpipe.schedule.timeline import Timeline
from fpipe.transport.connect import device_of

_FEW: Final = 16  # numbers of four bytes in a message
_MANY: Final = 1 << 20


class LinkTimes(NamedTuple):
    """Seconds from the end of an action to the arrival of a message: `latency`, and for each byte
    `per_byte`."""

    latency: float
    per_byte: float


def measured_links(
    group: dist.ProcessGroup, placement: Sequence[int], *, steps: int, timeout: float
) -> LinkTimes:
    """Send messages of 64 bytes and of 4 MiB along a placement and back, and compare.

    Each message is alone. Every rank of the group calls this.

    Args:
        group: of the ranks.
        placement: the rank of each stage.
        steps: how often, after one that is not measured.
        timeout: as for `fpipe.pipeline`.
    """
    schedule = all_forwards_first(placement, 1, split=False, ranks=group.size())
    stages = [_carry] * len(placement)
    pipe = pipeline(stages, _mean, schedule, compile=False, group=group, timeout=timeout)
    device = device_of(group)
    params = pipe.local([torch.ones((), device=device) for _ in placement])
    times = []
    for numbers in (_FEW, _MANY):
        batch = torch.ones(1, numbers, device=device)
        with record(alone=True) as recording:
            for _ in range(steps + 1):
                pipe.step(params, batch)
        delays = [delay for timeline in recording.timelines[1:] for delay in hops(timeline)]
        times.append(max(0.0, median(delays or [0.0])))
    few, many = times
    return LinkTimes(few, max(0.0, many - few) / (4 * (_MANY - _FEW)))


def _carry(weight: Tensor, x: Tensor) -> Tensor:
    return x * weight


def _mean(y: Tensor, _: Tensor) -> Tensor:
    return y.mean()


def hops(timeline: Timeline) -> list[float]:
    """How long each value took to a rank that was waiting for it.

    What had nothing to compute took no time and read nothing; W then reads what I would have.
    """
    delays = []
    rows = [[event for event in row if event.end > event.start] for row in timeline.events]
    ended = {event.action: event.end for row in rows for event in row}
    placement = timeline.schedule.placement
    for row in rows:
        for before, event in pairwise(row):
            stage, op, microbatch = event.action
            if op == Op.W and Action(stage, Op.I, microbatch) in ended:
                continue
            source = stage - 1 if op == Op.F else stage + 1
            if not 0 <= source < len(placement) or placement[source] == event.rank:
                continue
            sent = [
                ended[action]
                for kind in ((Op.F,) if op == Op.F else (Op.B, Op.I))
                if (action := Action(source, kind, microbatch)) in ended
            ]
            if sent and sent[0] >= before.end:
                delays.append(event.start - sent[0])
    return delays
