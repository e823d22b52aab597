"""What each stage of a divided module gets, as values and as a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


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
