"""A part of the ranks of a pipeline, as if all the others had nothing else to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fpipe.schedule.cost import StageCosts


@dataclass(frozen=True)
class Part:
    """What a part of the ranks computes, keeps and waits for. Lists are per stage of the part.

    What the other ranks do is a delay: the least time from an action of the part to the next that
    reads its result. With every rank in the part, it is the whole problem.

    Attributes:
        stages: the numbers of its stages in the pipeline, in order.
        rank_of: of each stage, the index of its rank in the part.
        own: per rank of the part, the indices of its stages.
        durations: of F, I and W, per stage.
        forward_delay: from the end of F to when the next stage of the part can run F; for the last
            stage, to when it can run I itself.
        backward_delay: from the end of I to when the stage before can run I; 0 for the first.
        kept: what F keeps.
        freed: what of it I frees.
        memory: the limit of each rank of the part.
        release: when the first stage can begin.
        tail: from the end of the first stage's last I to the end of the step.
    """

    stages: tuple[int, ...]
    rank_of: tuple[int, ...]
    own: tuple[tuple[int, ...], ...]
    durations: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    forward_delay: tuple[float, ...]
    backward_delay: tuple[float, ...]
    kept: tuple[float, ...]
    freed: tuple[float, ...]
    memory: tuple[float, ...]
    release: float
    tail: float


def part_of(
    costs: StageCosts, placement: Sequence[int], memory: Sequence[float], ranks: Sequence[int]
) -> Part:
    """Cut `ranks` out of a pipeline.

    A full backward counts as its cheaper halves: handing on after the lesser of I and B, done after
    the lesser of I + W and B. Where I hands W more than it frees, the difference is left out. So
    the part never takes longer than the pipeline.
    """
    stages = tuple(stage for stage, rank in enumerate(placement) if rank in ranks)
    hand, full = costs.handover, costs.backward
    starts, returns = costs.lone
    last, first = stages[-1], stages[0]
    pairs = list(pairwise(stages))
    rank_of = tuple(ranks.index(placement[stage]) for stage in stages)
    return Part(
        stages=stages,
        rank_of=rank_of,
        own=tuple(
            tuple(at for at, owner in enumerate(rank_of) if owner == rank)
            for rank in range(len(ranks))
        ),
        durations=(
            tuple(costs.f[stage] for stage in stages),
            tuple(hand[stage] for stage in stages),
            tuple(full[stage] - hand[stage] for stage in stages),
        ),
        forward_delay=(
            *(starts[after] - starts[stage] - costs.f[stage] for stage, after in pairs),
            returns[last] - starts[last] - costs.f[last],
        ),
        backward_delay=(
            0.0,
            *(returns[stage] - returns[after] - hand[after] for stage, after in pairs),
        ),
        kept=tuple(costs.activation[stage] for stage in stages),
        freed=tuple(max(0.0, costs.freed_by_i[stage]) for stage in stages),
        memory=tuple(memory[rank] for rank in ranks),
        release=starts[first],
        tail=returns[0] + full[0] - returns[first] - hand[first] if first else 0.0,
    )
