"""What a stage holds of a rank's memory, estimated from its parts before anything is traced for it.

More is counted than is held, where ranks have several stages up to twice as much, seldom more: of
each stage the most that it holds is added up, although these do not come together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from fpipe.schedule import Op, Schedule
from fpipe.schedule.events import counted_as

if TYPE_CHECKING:  # it imports torch, and tables of schedules do not
    from fpipe.modules.module_parts import Crossing, Part


class Held(NamedTuple):
    """How many microbatches a stage holds something of.

    Attributes:
        open: forward done, the gradient of its inputs not.
        left: that is done, the gradient of its parameters not.
    """

    open: int
    left: int


class _Run(NamedTuple):
    """Bytes of adjacent parts, whatever stage they are; all but the first for one microbatch.

    Attributes:
        once: parameters, their gradients, and what is made of them alone.
        kept: values that they make and their backward needs.
        left: what is kept of these, and of their gradients, for those of parameters.
        shared: values from before that their backward needs and the part before keeps anyway.
        saved: the other values from before that their backward needs.
        received: all values from before that they read.
        sent: values of theirs that are read behind them.
        running: what an operation reads and writes, at most, of values and of gradients.
    """

    once: int
    kept: int
    left: int
    shared: int
    saved: int
    received: int
    sent: int
    running: int


class Memory:
    """Bytes that stages need.

    Args:
        parts: of the module.
        sizes: of the parameters.
        schedule: says how many microbatches a stage holds at once.
    """

    def __init__(self, parts: Sequence[Part], sizes: Mapping[str, int], schedule: Schedule) -> None:
        self._parts = parts
        self._sizes = sizes
        self._placement = schedule.placement
        self._held = held_at_once(schedule)
        self._run: Callable[[int, int], _Run] = cache(self._add)

    def params(self, first: int, end: int) -> int:
        """Bytes of the parameters that parts read."""
        return sum(self._sizes[name] for name in self._read(first, end))

    def of(self, stage: int, first: int, end: int) -> int:
        """What a stage of these parts needs on its rank."""
        run, held = self._run(first, end), self._held[stage]
        need = run.once + max(some.open * run.kept + some.left * run.left for some in held)
        most = max(map(sum, held))
        need += most * run.saved + run.running
        if self._is_far(stage, stage - 1):
            # One more is on its way, and the gradient of one goes back.
            need += most * run.shared + 2 * run.received
        if self._is_far(stage, stage + 1):
            need += 2 * run.sent
        return need

    def at_least(self, stage: int, first: int, end: int) -> int:
        """What these parts need in the stage, with what goes from part to part left out."""
        kept = sum(part.kept for part in self._parts[first:end])
        return self._run(first, end).once + max(some.open for some in self._held[stage]) * kept

    def _is_far(self, stage: int, other: int) -> bool:
        """Whether another stage is there, on another rank."""
        among = 0 <= other < len(self._placement)
        return among and self._placement[other] != self._placement[stage]

    def _read(self, first: int, end: int) -> frozenset[str]:
        """The parameters that any of these parts reads."""
        return frozenset().union(*(part.params for part in self._parts[first:end]))

    def _add(self, first: int, end: int) -> _Run:
        own = self._parts[first:end]
        inputs = {value for part in own for value in part.reads if value.part < first}
        behind = {value for part in self._parts[end:] for value in part.reads}
        saves = {value for part in own for value in part.saves}
        within = {value for value in saves if value.part >= first}
        shared = {value for value in saves if value.part == first - 1 and value.is_kept}
        # A parameter's gradient is made, and cast, before it is added to the others.
        gradient = max((self._sizes[name] for name in self._read(first, end)), default=0)
        return _Run(
            once=2 * self.params(first, end) + sum(part.prepared for part in own),
            kept=sum(part.kept for part in own) + _size(v for v in within if not v.is_kept),
            left=sum(part.left for part in own) + _size(within),
            shared=_size(shared),
            saved=_size(saves - within - shared),
            received=_size(inputs),
            sent=_size(value for value in behind if first <= value.part < end),
            running=2 * (max(part.biggest for part in own) + gradient),
        )


def _size(values: Iterable[Crossing]) -> int:
    return sum(value.nbytes for value in values)


def held_at_once(schedule: Schedule) -> list[frozenset[Held]]:
    """For each stage, all that it holds at some time.

    What no backward reads is held while F runs.
    """
    now = [Held(0, 0)] * schedule.num_stages
    found = [{held} for held in now]
    actions = [action for row in schedule.actions for action in row]
    for (stage, op, _), counted in zip(actions, counted_as(actions), strict=True):
        opened, left = now[stage]
        match counted:
            case Op.F:
                now[stage] = Held(opened + 1, left)
            case Op.B:
                now[stage] = Held(opened - 1, left)
            case Op.I:
                now[stage] = Held(opened - 1, left + 1)
            case Op.W:
                now[stage] = Held(opened, left - 1)
            case None if op == Op.F:
                found[stage].add(Held(1, 0))
        found[stage].add(now[stage])
    return [frozenset(held) for held in found]


@dataclass(frozen=True)
class StageShare:
    """What one stage gets.

    Attributes:
        rank: that runs it.
        first: the candidate that ends its first part.
        last: the candidate that ends its last part; empty for the end of the module.
        flops: of the forward of one microbatch.
        moved: bytes that this reads and writes.
        load: what was balanced: the FLOPs, and the bytes as FLOPs; or the seconds.
        params: bytes of the parameters that it reads.
        memory: bytes that its rank needs for it, at most, as the argument of `fpipe.balance` says.
        sends: bytes that cross the boundary behind it, for one microbatch.
    """

    rank: int
    first: str
    last: str
    flops: int
    moved: int
    load: float
    params: int
    memory: int
    sends: int


@dataclass(frozen=True)
class Balance:
    """A module divided into stages; it prints as a table.

    Attributes:
        cuts: the submodules after which a stage ends.
        stages: what each stage gets.
        parts: what was divided: the name of each candidate with the load of what it ends; the last
            has no name.
        unit: of the loads, ``"FLOP"`` or ``"s"``.
    """

    cuts: tuple[str, ...]
    stages: tuple[StageShare, ...]
    parts: tuple[tuple[str, float], ...]
    unit: str

    @property
    def evenness(self) -> float:
        """The mean load of a stage over the biggest: 1 if all are equal."""
        return _evenness([stage.load for stage in self.stages])

    @property
    def rank_evenness(self) -> float:
        """The mean load of a rank, with all its stages, over the biggest."""
        loads: dict[int, float] = defaultdict(float)
        for stage in self.stages:
            loads[stage.rank] += stage.load
        return _evenness(list(loads.values()))

    def __str__(self) -> str:
        whole = sum(stage.load for stage in self.stages) or 1
        timed = self.unit == "s"
        header = ["stage", "rank", "ends after", "share", *["ms"] * timed]
        rows = [[*header, "GFLOP", "params MB", "sends MB"]]
        for number, stage in enumerate(self.stages):
            rows.append(
                [
                    *(str(number), str(stage.rank), stage.last or "the end"),
                    *(f"{stage.load / whole:.1%}", *[f"{stage.load * 1e3:.4g}"] * timed),
                    *(f"{stage.flops / 1e9:.4g}", f"{stage.params / 1e6:.4g}"),
                    f"{stage.sends / 1e6:.4g}",
                ]
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        summary = f"evenness {self.evenness:.1%}"
        if len({stage.rank for stage in self.stages}) < len(self.stages):
            summary += f", of ranks {self.rank_evenness:.1%}"
        return "\n".join([*lines, summary])


def _evenness(loads: Sequence[float]) -> float:
    return sum(loads) / len(loads) / (max(loads) or 1)
