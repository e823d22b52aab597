"""Whole-stage work in the tables of a search: actions beside those of an order, and their lanes.

An order has F, I and W alone. To evaluate it, more actions are put into copies of its rows:

    rank    GATE 0F0 0F1 0I0 0W0 0I1 0W1 DONE · UPDATE
    lane    UNSHARD                      REDUCE_GRAD

GATE waits for what UNSHARD gathers, DONE says that the last gradient is there; neither takes any
time. Without a lane UNSHARD and REDUCE_GRAD stand in their places. UPDATE goes into the first idle
time that is long enough. So the times are those of `whole_stage_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fpipe.schedule.orders.problem import Problem
from fpipe.schedule.whole_stage import first_gaps

_GATE, _UNSHARD, _DONE, _REDUCE, _UPDATE = range(5)
_KINDS: Final = 5


class WholeStageWork:
    """The numbers and times of the whole-stage actions of a problem.

    Attributes:
        first: their first number; they follow those of F, I and W.
        duration: time of each.
        source: the action that each waits for, or -1.
    """

    def __init__(self, problem: Problem) -> None:
        costs, stages = problem.costs, len(problem.placement)
        self.first, self.stages, self.count = problem.actions, stages, problem.microbatches
        self.shards, self.updates = problem.cost.shards, problem.cost.updates
        self.lane = self.shards and costs.collective_lane
        self.stages_of, self.update = problem.stages, costs.update
        none = (0.0,) * stages
        self.duration = [*none, *costs.unshard, *none, *costs.reduce_grad, *costs.update]
        last = _REDUCE if self.shards else _DONE
        self.source = [
            *(self.number(_UNSHARD, stage) if self.lane else -1 for stage in range(stages)),
            *[-1] * (2 * stages),
            *(self.number(_DONE, stage) if self.lane else -1 for stage in range(stages)),
            *(self.number(last, stage) for stage in range(stages)),
        ]

    def __len__(self) -> int:
        return _KINDS * self.stages

    def number(self, kind: int, stage: int) -> int:
        """The number of an action."""
        return self.first + kind * self.stages + stage

    def dressed(self, rows: Sequence[list[int]]) -> list[list[int]]:
        """The rows with all but updates, and behind them the lanes, where there are any."""
        dressed = [self._dressed(rank, row) for rank, row in enumerate(rows)]
        if not self.lane:
            return [ranks for ranks, _ in dressed]
        return [*(ranks for ranks, _ in dressed), *(lane for _, lane in dressed)]

    def _dressed(self, rank: int, row: list[int]) -> tuple[list[int], list[int]]:
        """A row of a rank, and its lane."""
        many, width = len(self.stages_of[rank]), 3 * self.count
        firsts: dict[int, int] = {}  # stage -> place of its first action
        for place, action in enumerate(row):
            if firsts.setdefault(action // width, place) == place and len(firsts) == many:
                break
        lasts: dict[int, int] = {}  # stage -> place of its last action, which is a gradient
        for place in range(len(row) - 1, -1, -1):
            if lasts.setdefault(row[place] // width, place) == place and len(lasts) == many:
                break
        row = row.copy()
        ends = sorted(lasts, key=lasts.__getitem__)
        behind = _REDUCE if self.shards and not self.lane else _DONE
        for stage in reversed(ends):
            row.insert(lasts[stage] + 1, self.number(behind, stage))
        if not self.shards:
            return row, []
        if not self.lane:
            return [*(self.number(_UNSHARD, stage) for stage in firsts), *row], []
        for stage in reversed(firsts):
            row.insert(firsts[stage], self.number(_GATE, stage))
        lane = [self.number(_UNSHARD, stage) for stage in firsts]
        return row, lane + [self.number(_REDUCE, stage) for stage in ends]

    def finish(self, dressed: list[list[int]], ends: list[float], duration: list[float]) -> None:
        """Put the updates into dressed rows whose actions have ends, and give them theirs."""
        if not self.updates:
            return
        last = _DONE if self.lane or not self.shards else _REDUCE
        for rank, stages in enumerate(self.stages_of):
            row = dressed[rank]
            reduced = {
                stage: ends[self.number(_REDUCE if self.shards else _DONE, stage)]
                for stage in stages
            }
            places = {stage: row.index(self.number(last, stage)) + 1 for stage in stages}
            begin = min(places.values())
            gaps = first_gaps(
                [ends[action] - duration[action] for action in row[begin:]],
                [ends[action] for action in row[begin:]],
                {stage: (places[stage] - begin, reduced[stage]) for stage in stages},
                self.update,
            )
            for gap in sorted(gaps, key=lambda gap: gap.end, reverse=True):
                number = self.number(_UPDATE, gap.stage)
                ends[number] = gap.end
                row.insert(begin + gap.place, number)

    def spans(
        self, dressed: list[list[int]], ends: list[float], firsts: list[float]
    ) -> list[float]:
        """The time of each rank from its first start to its last end, its lane included."""
        ranks = len(self.stages_of)
        last = [max((ends[action] for action in row), default=0.0) for row in dressed]
        if self.lane:
            last = list(map(max, last[:ranks], last[ranks:]))
        if self.shards:
            return last  # a rank that gathers begins with it, at once
        return [end - first for end, first in zip(last, firsts, strict=True)]

    def least_tail(self, stage: int) -> float:
        """The time of the whole-stage work behind the last gradient of a stage."""
        at = self.stages
        return self.duration[_REDUCE * at + stage] + self.duration[_UPDATE * at + stage]
