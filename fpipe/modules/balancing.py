"""Choose the cuts of a module: count its parts, divide them, and show the result as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from torch import nn

from fpipe.errors import StageError
from fpipe.microbatch import split
from fpipe.modules.costs import Part, parts_of
from fpipe.modules.division import divide
from fpipe.modules.loss import Loss
from fpipe.schedule import Op, Schedule
from fpipe.shapes import batch_shapes

INTENSITY = 10
"""FLOPs that a machine does while it moves a byte, unless told."""


@dataclass(frozen=True)
class StageShare:
    """What one stage gets.

    Attributes:
        rank: that runs it.
        first: the candidate that ends its first part.
        last: the candidate that ends its last part; empty for the end of the module.
        flops: of the forward of one microbatch.
        moved: bytes that this reads and writes.
        load: what was balanced: the FLOPs, and the bytes as FLOPs.
        params: bytes of the parameters that it reads.
        memory: bytes that its rank needs for it.
        sends: bytes that cross the boundary behind it, for one microbatch.
    """

    rank: int
    first: str
    last: str
    flops: int
    moved: int
    load: int
    params: int
    memory: int
    sends: int


@dataclass(frozen=True)
class Balance:
    """A module divided into stages; it prints as a table.

    Attributes:
        cuts: the submodules after which a stage ends.
        stages: what each stage gets.
    """

    cuts: tuple[str, ...]
    stages: tuple[StageShare, ...]

    @property
    def evenness(self) -> float:
        """The mean load of a stage over the biggest: 1 if all are equal."""
        loads = [stage.load for stage in self.stages]
        return sum(loads) / len(loads) / max(*loads, 1)

    def __str__(self) -> str:
        whole = max(sum(stage.load for stage in self.stages), 1)
        header = ("stage", "rank", "ends after", "share", "GFLOP", "params MB", "sends MB")
        rows = [header]
        for number, stage in enumerate(self.stages):
            rows.append(
                (
                    *(str(number), str(stage.rank), stage.last or "the end"),
                    *(f"{stage.load / whole:.1%}", f"{stage.flops / 1e9:.4g}"),
                    *(f"{stage.params / 1e6:.4g}", f"{stage.sends / 1e6:.4g}"),
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        return "\n".join([*lines, f"evenness {self.evenness:.1%}"])


def balance(
    module: nn.Module,
    schedule: Schedule,
    batch: Any,
    *,
    loss: Loss | None = None,
    in_dims: Any = 0,
    candidates: Sequence[str] | None = None,
    memory: float = inf,
    intensity: int = INTENSITY,
    slack: float = 0.02,
) -> Balance:
    """Choose the cuts of a module for a schedule, by what its forward costs.

    The module is recorded on abstract tensors, so it may be as big as it likes: its parameters,
    and the batch, may lie on the meta device. Of all ways to divide the chain of candidates, the
    one whose slowest stage is fastest is found exactly (dynamic programming); among those within
    `slack` of it, the one that sends least between ranks.

    Args:
        module: as for `from_module`.
        schedule: its placement says which stages lie on one rank, its number of microbatches how
            the batch is split.
        batch: an example; only its shapes count.
        loss: as for `from_module`.
        in_dims: as for `fpipe.pipeline`.
        candidates: names of submodules after which a cut may be; None takes the children of the
            outermost `ModuleList`s and `Sequential`s. Those not called exactly once are left out.
        memory: bytes that a rank may hold: parameters and their gradients, and for every
            microbatch that the schedule lets a stage hold at once, the values that its forward
            makes (more than it keeps). A tied parameter counts for each stage that reads it.
        intensity: FLOPs that the machine does in the time of moving one byte: a part costs its
            FLOPs and this many for each byte that it reads or writes.
        slack: fraction.

    Raises:
        StageError: the module cannot be traced, has too few candidates, or does not fit.

    Example:
        >>> import torch, fpipe
        >>> module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
        >>> found = fpipe.balance(
        ...     module,
        ...     fpipe.schedules.one_f_one_b(ranks=3, microbatches=4),
        ...     {"input": torch.ones(8, 8)},
        ...     loss=lambda output, batch: output.sum(),
        ... )
        >>> found.cuts
        ('1', '3')
    """
    if intensity < 0 or slack < 0:
        raise StageError(
            f"intensity={intensity!r} and slack={slack!r} must not be negative: intensity is FLOPs "
            "for each byte, slack a fraction such as 0.02"
        )
    parts = split(batch, in_dims, schedule.num_microbatches)
    counted = parts_of(module, batch_shapes(parts)[0], loss, candidates)
    sizes = {name: p.numel() * p.element_size() for name, p in module.named_parameters()}
    held = held_at_once(schedule)

    def memory_of(stage: int, first: int, end: int) -> int:
        own = counted[first:end]
        return 2 * sum(sizes[name] for name in _read(own)) + held[stage] * sum(
            part.kept for part in own
        )

    loads = [part.flops + intensity * part.moved for part in counted]
    widths = [part.width for part in counted]
    found = divide(loads, widths, schedule.placement, memory=memory_of, limit=memory, slack=slack)
    shares = []
    for stage, (first, end) in enumerate(zip((0, *found.ends), found.ends, strict=False)):
        own = counted[first:end]
        shares.append(
            StageShare(
                rank=schedule.placement[stage],
                first=own[0].name,
                last=own[-1].name,
                flops=sum(part.flops for part in own),
                moved=sum(part.moved for part in own),
                load=sum(loads[first:end]),
                params=sum(sizes[name] for name in _read(own)),
                memory=memory_of(stage, first, end),
                sends=own[-1].width,
            )
        )
    return Balance(tuple(share.last for share in shares[:-1]), tuple(shares))


def _read(parts: Sequence[Part]) -> frozenset[str]:
    """The parameters that any of them reads."""
    return frozenset().union(*(part.params for part in parts))


def held_at_once(schedule: Schedule) -> list[int]:
    """For each stage, the most microbatches whose forward has run and whose backward has not."""
    most = [0] * schedule.num_stages
    now = [0] * schedule.num_stages
    for row in schedule.actions:
        for action in row:
            if action.op == Op.F:
                now[action.stage] += 1
                most[action.stage] = max(most[action.stage], now[action.stage])
            elif action.op in (Op.B, Op.W):
                now[action.stage] -= 1
    return most
