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
        durations: of F, I, W and B, per stage.
        backwards: per stage, the kinds of its backward that are worth a try: I, with W apart, or B.
        free: nothing that is of use is left out of `backwards`.
        full: per stage, the least time of a whole backward by those.
        eager: per stage, whether an I in a gap is never worse than what could come later.
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
    durations: tuple[tuple[float, ...], ...]
    backwards: tuple[tuple[int, ...], ...]
    free: bool
    full: tuple[float, ...]
    eager: tuple[bool, ...]
    forward_delay: tuple[float, ...]
    backward_delay: tuple[float, ...]
    kept: tuple[float, ...]
    freed: tuple[float, ...]
    memory: tuple[float, ...]
    release: float
    tail: float


def part_of(
    costs: StageCosts,
    placement: Sequence[int],
    memory: Sequence[float],
    ranks: Sequence[int],
    *,
    kinds: tuple[int, ...] | None = None,
) -> Part:
    """Cut `ranks` out of a pipeline.

    On the ranks that are left out every backward hands on after the lesser of I and B, so that the
    part never takes longer than the pipeline.

    Args:
        costs: of all stages.
        placement: the rank of each stage.
        memory: the limit of each rank.
        ranks: those of the part.
        kinds: of backwards that the part may take, (1,) for I and W, (3,) for B; None for whatever
            is of use.
    """
    stages = tuple(stage for stage, rank in enumerate(placement) if rank in ranks)
    hand, full = costs.handover, costs.backward
    starts, returns = costs.lone
    last, first = stages[-1], stages[0]
    pairs = list(pairwise(stages))
    rank_of = tuple(ranks.index(placement[stage]) for stage in stages)
    f, i, w, b, freed = (
        tuple(row[stage] for stage in stages)
        for row in (costs.f, costs.i, costs.w, costs.b, costs.freed_by_i)
    )
    backwards = tuple(
        kinds or ((1,) if b[at] >= i[at] + w[at] and freed[at] >= 0 else (1, 3))
        for at in range(len(stages))
    )
    return Part(
        stages=stages,
        rank_of=rank_of,
        own=tuple(
            tuple(at for at, owner in enumerate(rank_of) if owner == rank)
            for rank in range(len(ranks))
        ),
        durations=(f, i, w, b),
        backwards=backwards,
        free=kinds is None,
        full=tuple(
            min(i[at] + w[at] if kind == 1 else b[at] for kind in ways)
            for at, ways in enumerate(backwards)
        ),
        eager=tuple(
            freed[at] >= 0 and (ways == (1,) or w[at] <= b[at]) for at, ways in enumerate(backwards)
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
        freed=freed,
        memory=tuple(memory[rank] for rank in ranks),
        release=starts[first],
        tail=returns[0] + full[0] - returns[first] - hand[first] if first else 0.0,
    )
