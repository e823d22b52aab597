"""The whole-stage work that no schedule can hide: before its first action, and behind its last."""

from __future__ import annotations

from collections.abc import Sequence

from fpipe.schedule.stage_costs import StageCosts


def with_whole_stage_work(
    bound: float,
    costs: StageCosts,
    stages_of: Sequence[Sequence[int]],
    microbatches: int,
    span: bool,
) -> float:
    """A lower bound with whole-stage work, from one without.

    Stage 0 is gathered before anything computes. Behind the last gradient of all, that of some
    stage, that stage is reduced and updated. The same holds for each rank and its stages, whose
    updates are work of the rank, and so are gathers and reductions without a lane.

    Args:
        bound: on all but whole-stage work.
        costs: of microbatches that are alike.
        stages_of: the stages of each rank.
        microbatches: how many there are.
        span: whether the bound is on a span, where the wait for the first input does not count.

    Example:
        >>> from fpipe import Cost
        >>> costs = Cost(f=1, i=1, w=1, unshard=5, reduce_grad=7).on([0])
        >>> with_whole_stage_work(6.0, costs, [[0]], 2, span=False)
        18.0
    """
    gathers, reductions, updates = costs.unshard, costs.reduce_grad, costs.update
    ends = [reduction + update for reduction, update in zip(reductions, updates, strict=True)]
    lead = min(gathers) if span else gathers[0]
    best = lead + bound + min(ends)
    starts, _ = costs.earliest
    for stages in stages_of:
        if not stages:
            continue
        first = stages[0]  # the others need it
        begin = gathers[first] if span else max(gathers[first], gathers[0] + starts[first])
        work = microbatches * sum(costs.f[stage] + costs.backward[stage] for stage in stages)
        after = sum(updates[stage] for stage in stages)
        if not costs.collective_lane:
            after += sum(reductions[stage] for stage in stages)
            best = max(best, sum(gathers[stage] for stage in stages) + work + after)
        best = max(best, begin + work + max(after, min(ends[stage] for stage in stages)))
    return best
