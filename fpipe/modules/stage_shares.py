"""The share of each stage of a divided module: its costs as a table, and the memory that it needs.

Memory is estimated from parts, before anything is traced for the stage. The estimate exceeds what
the stage holds; where ranks have several stages up to twofold, seldom more, for the peaks of all
stages are added up, although they do not come at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from fpipe.schedule import Op, Schedule
from fpipe.schedule.simulation.events import counted_as

if TYPE_CHECKING:  # it imports torch, and tables of schedules do not
    from fpipe.modules.module_parts import Crossing, Part


@dataclass(frozen=True)
class StageShare:
    """The costs of one stage.

    Attributes:
        rank: the rank that runs it.
        first: the candidate that ends its first part.
        last: the candidate that ends its last part; empty for the end of the module.
        flops: of the forward of one microbatch.
        moved: bytes that this forward reads and writes.
        load: the number that was balanced: FLOPs, with bytes as FLOPs; or seconds; over the speed
            of its rank.
        params: bytes of the parameters that it reads.
        memory: bytes that its rank needs for it at most, as `fpipe.balance` counts them.
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
        stages: the share of each stage.
        parts: the name of each candidate, with the load of the part that it ends; the last part has
            no name.
        unit: of the loads, ``"FLOP"`` or ``"s"``.

    Example:
        >>> import torch, fpipe
        >>> module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
        >>> batch, loss = {"input": torch.ones(4, 8)}, lambda output, batch: output.sum()
        >>> fpipe.balance(module, schedule, batch, loss=loss).cuts
        ('1',)
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
        rows = self._table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        return "\n".join([*lines, self._summary()])

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        from fpipe.schedule.picture.tables import table

        header, *rows = self._table()
        return table("Balance of the stages", header, rows, self._summary())

    def _table(self) -> list[list[str]]:
        """The header and a row for each stage."""
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
        return rows

    def _summary(self) -> str:
        summary = f"evenness {self.evenness:.1%}"
        if len({stage.rank for stage in self.stages}) < len(self.stages):
            summary += f", of ranks {self.rank_evenness:.1%}"
        return summary


def _evenness(loads: Sequence[float]) -> float:
    return sum(loads) / len(loads) / (max(loads) or 1)


# ── memory ────────────────────────────────────────────────────────────────────────────────────────


class Held(NamedTuple):
    """The number of microbatches of which a stage holds values.

    Attributes:
        open: of these the forward is done, and the gradient of the inputs is not.
        left: of these that gradient is done, and the gradient of the parameters is not.
    """

    open: int
    left: int


class _Run(NamedTuple):
    """Bytes of adjacent parts, in any stage; all but the first attribute for one microbatch.

    Attributes:
        once: parameters, their gradients, and values computed from parameters alone.
        kept: values that the parts compute and their backward needs.
        left: values and gradients that are kept for the gradients of parameters.
        shared: values from before that their backward needs and the part before keeps anyway.
        saved: the other values from before that their backward needs.
        received: all values from before that they read.
        sent: values of theirs that are read behind them.
        running: values and gradients that one operation reads and writes, at most.
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
        sizes: bytes of each parameter, by name.
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
        """The bytes that a stage of these parts needs on its rank."""
        run, held = self._run(first, end), self._held[stage]
        need = run.once + max(some.open * run.kept + some.left * run.left for some in held)
        most = max(map(sum, held))
        need += most * run.saved + run.running
        if self._is_far(stage, stage - 1):
            # One more microbatch is on its way, and the gradient of one goes back.
            need += most * run.shared + 2 * run.received
        if self._is_far(stage, stage + 1):
            need += 2 * run.sent
        return need

    def at_least(self, stage: int, first: int, end: int) -> int:
        """The bytes that these parts need in the stage, without values that cross between parts."""
        kept = sum(part.kept for part in self._parts[first:end])
        return self._run(first, end).once + max(some.open for some in self._held[stage]) * kept

    def _is_far(self, stage: int, other: int) -> bool:
        """Whether another stage exists, and lies on another rank."""
        exists = 0 <= other < len(self._placement)
        return exists and self._placement[other] != self._placement[stage]

    def _read(self, first: int, end: int) -> frozenset[str]:
        """The parameters that any of these parts reads."""
        return frozenset().union(*(part.params for part in self._parts[first:end]))

    def _add(self, first: int, end: int) -> _Run:
        parts = self._parts[first:end]
        inputs = {value for part in parts for value in part.reads if value.part < first}
        behind = {value for part in self._parts[end:] for value in part.reads}
        saves = {value for part in parts for value in part.saves}
        within = {value for value in saves if value.part >= first}
        shared = {value for value in saves if value.part == first - 1 and value.is_kept}
        # The gradient of a parameter is computed, and cast, before it is added to the sum.
        gradient = max((self._sizes[name] for name in self._read(first, end)), default=0)
        return _Run(
            once=2 * self.params(first, end) + sum(part.prepared for part in parts),
            kept=sum(part.kept for part in parts) + _size(v for v in within if not v.is_kept),
            left=sum(part.left for part in parts) + _size(within),
            shared=_size(shared),
            saved=_size(saves - within - shared),
            received=_size(inputs),
            sent=_size(value for value in behind if first <= value.part < end),
            running=2 * (max(part.biggest for part in parts) + gradient),
        )


def _size(values: Iterable[Crossing]) -> int:
    return sum(value.nbytes for value in values)


def held_at_once(schedule: Schedule) -> list[frozenset[Held]]:
    """For each stage, the numbers of microbatches that it holds at some time.

    Values that no backward reads are held while F runs.
    """
    now = [Held(0, 0)] * schedule.num_stages
    seen = [{held} for held in now]
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
                seen[stage].add(Held(1, 0))
        seen[stage].add(now[stage])
    return [frozenset(held) for held in seen]
