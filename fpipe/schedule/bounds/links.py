"""Lower bounds by messages: of one link, which carries one at a time, or of a rank that sends."""

from __future__ import annotations

from collections.abc import Sequence

from fpipe.schedule.stage_costs import StageCosts


def link_bound(costs: StageCosts, microbatches: float) -> float:
    """The makespan by the busiest link: before its first message, all of them, after the last.

    Args:
        costs: of the smallest microbatch.
        microbatches: how many of that size are as large as all there are.

    Example:
        >>> from fpipe import Cost
        >>> link_bound(Cost(f=1, i=1, w=1, transfer=10).on([0, 1]), 8)
        94.0
    """
    starts, returns = costs.earliest
    end = returns[0] + costs.gradient[0]
    first: dict[int, float] = {}  # by link: when its first message is there at the earliest
    work: dict[int, float] = {}
    rest: dict[int, float] = {}  # the least time from a transfer to the end of the step
    for stage, (down, up) in enumerate(zip(costs.down_links, costs.up_links, strict=True)):
        for link, made, read in (
            (down, starts[stage] + costs.f[stage], starts[stage + 1]),
            (up, returns[stage + 1] + costs.gradient[stage + 1], returns[stage]),
        ):
            if link.transfer:
                at = link.number
                first[at] = min(made, first.get(at, made))
                work[at] = work.get(at, 0.0) + microbatches * link.transfer
                after = link.latency + end - read
                rest[at] = min(after, rest.get(at, after))
    return max((first[at] + work[at] + rest[at] for at in first), default=0.0)


def sending_bound(
    costs: StageCosts, stages_of: Sequence[Sequence[int]], work: float, messages: float
) -> float:
    """The makespan by the rank that is busiest where it does nothing else while it sends.

    Args:
        costs: of the smallest microbatch.
        stages_of: the stages of each rank.
        work: how many of them take as long as all there are.
        messages: how many of them send as much.

    Example:
        >>> from fpipe import Cost
        >>> costs = Cost(f=1, i=1, w=1, transfer=2, blocking=True).on([0, 1])
        >>> sending_bound(costs, [[0], [1]], 8, 8)
        43.0
    """
    starts, _ = costs.earliest
    best = 0.0
    for stages in stages_of:
        total = starts[stages[0]] if stages else 0.0
        for stage in stages:
            total += work * (costs.f[stage] + costs.backward[stage])
            if stage < len(costs.down_links):
                total += messages * costs.down_links[stage].transfer
            if stage:
                total += messages * costs.up_links[stage - 1].transfer
        best = max(best, total)
    return best
