"""A lower bound by the messages of one link, which carries one at a time."""

from __future__ import annotations

from fpipe.schedule.stage_costs import StageCosts


def link_bound(costs: StageCosts, microbatches: int) -> float:
    """The makespan by the busiest link: before its first message, all of them, after the last.

    Args:
        costs: of microbatches that are alike.
        microbatches: how many there are.

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
