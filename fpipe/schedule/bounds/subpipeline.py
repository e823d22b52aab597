"""A few ranks of a pipeline, as if all the others had nothing else to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fpipe.schedule.stage_costs import StageCosts


@dataclass(frozen=True)
class Subpipeline:
    """Some ranks of a pipeline: what they compute, keep and wait for. Tuples are per stage.

    The other ranks are delays: the least time from an action here to the next that reads its
    result. With every rank, it is the whole pipeline.

    Attributes:
        stages: the numbers of the stages in the pipeline, in order.
        rank_of: the index of each stage's rank here.
        stages_of: per rank, the indices of its stages.
        durations: of F, I, W and B, per stage.
        backwards: the kinds of backward that are worth a try: I, with W apart, or B.
        complete: `backwards` leaves out nothing that is of use.
        full: the least time of a whole backward by those.
        eager: whether an I in a gap is never worse than what could come later.
        forward_delay: from the end of F to when the next stage can run F; for the last stage, to
            when it can run I itself.
        backward_delay: from the end of I to when the stage before can run I; 0 for the first.
        kept: what F keeps.
        freed: the share of it that I frees.
        memory: the limit of each rank.
        release: when the first stage can begin.
        tail: from the end of the first stage's last I to the end of the step.
    """

    stages: tuple[int, ...]
    rank_of: tuple[int, ...]
    stages_of: tuple[tuple[int, ...], ...]
    durations: tuple[tuple[float, ...], ...]
    backwards: tuple[tuple[int, ...], ...]
    complete: bool
    full: tuple[float, ...]
    eager: tuple[bool, ...]
    forward_delay: tuple[float, ...]
    backward_delay: tuple[float, ...]
    kept: tuple[float, ...]
    freed: tuple[float, ...]
    memory: tuple[float, ...]
    release: float
    tail: float


def cut_subpipeline(
    costs: StageCosts,
    placement: Sequence[int],
    memory: Sequence[float],
    ranks: Sequence[int],
    *,
    kinds: tuple[int, ...] | None = None,
) -> Subpipeline:
    """Cut `ranks` out of a pipeline.

    On the ranks that are left out, every backward hands its gradient on after the lesser of I and
    B, so that the subpipeline never takes longer than the pipeline.

    The `kinds` of backwards are (1,) for I and W, (3,) for B, and None for all that are of use.
    """
    stages = tuple(stage for stage, rank in enumerate(placement) if rank in ranks)
    starts, returns = costs.earliest
    last, first = stages[-1], stages[0]
    pairs = list(pairwise(stages))
    rank_of = tuple(ranks.index(placement[stage]) for stage in stages)
    f, i, w, b, freed = (
        tuple(row[stage] for stage in stages)
        for row in (costs.f, costs.i, costs.w, costs.b, costs.freed_by_i)
    )
    numbers = range(len(stages))
    backwards = tuple(
        kinds or ((1,) if b[at] >= i[at] + w[at] and freed[at] >= 0 else (1, 3)) for at in numbers
    )
    gradient = costs.gradient
    return Subpipeline(
        stages=stages,
        rank_of=rank_of,
        stages_of=tuple(
            tuple(at for at in numbers if rank_of[at] == rank) for rank in range(len(ranks))
        ),
        durations=(f, i, w, b),
        backwards=backwards,
        complete=kinds is None,
        full=tuple(
            min(i[at] + w[at] if kind == 1 else b[at] for kind in backwards[at]) for at in numbers
        ),
        eager=tuple(freed[at] >= 0 and (backwards[at] == (1,) or w[at] <= b[at]) for at in numbers),
        forward_delay=(
            *(starts[after] - starts[stage] - costs.f[stage] for stage, after in pairs),
            returns[last] - starts[last] - costs.f[last],
        ),
        backward_delay=(
            0.0,
            *(returns[stage] - returns[after] - gradient[after] for stage, after in pairs),
        ),
        kept=tuple(costs.activation[stage] for stage in stages),
        freed=freed,
        memory=tuple(memory[rank] for rank in ranks),
        release=starts[first],
        tail=costs.tail_of(first),
    )
