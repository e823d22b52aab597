"""The automatic zero-bubble schedule: the list scheduler under the paper's rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from fpipe.schedule.arguments import plain_counts
from fpipe.schedule.cost import Cost, check_cost
from fpipe.schedule.orders.list_scheduler import UNLIMITED, Policy, list_schedule, plain_policy
from fpipe.schedule.orders.problem import Order, Problem, make_problem, to_schedule
from fpipe.schedule.placements import linear
from fpipe.schedule.schedule import Schedule


def zb_auto(
    *,
    ranks: int,
    microbatches: int,
    memory: float | Iterable[float] | None = None,
    cost: Cost | None = None,
) -> Schedule:
    """The automatic zero-bubble schedule: made for given costs, within a given memory.

    Source: the heuristic of Qi et al., Zero Bubble Pipeline Parallelism, section 3.1
    (https://arxiv.org/abs/2401.10241), written anew; with memory p their ZB-1p, with 2p their
    ZB-2p.

    Every rank runs forwards until gradients come back, then forwards and input gradients in turn. A
    weight gradient runs where the rank would wait for longer than it takes, or where only it can
    free the memory that a forward needs. Whether the first forwards stop at 1F1B's number or fill
    the memory, whether shorter waits are filled too, and whether a forward makes room for a
    gradient that is about to arrive, is tried out, and the least makespan is kept. An input
    gradient that hands on more than it frees, and finds no room for that, becomes a full backward.

    With f, i, w the times of F, I and W, memory p, m ≥ p, w no longer than f or i, and no latency,
    the bubble is that of `zb_h1`, (p−1)(f+i−w); it has no closed form elsewhere. The peak is at
    most `memory` by construction. `fpipe.search` tries far more, on every placement.

    Args:
        ranks: p, 1 or more; one stage per rank, stage s on rank s.
        microbatches: m, 1 or more.
        memory: the most activations a rank may hold, in the unit of ``cost.activation``: a number
            or one per rank; None for that of p microbatches, the largest where they differ.
        cost: what the schedule is made for; None for ``Cost(f=1, i=1, w=1)``.

    Returns:
        A schedule of F, I and W actions, and of B where the memory holds no I.

    Raises:
        ScheduleError: an argument is out of range, or the memory holds no microbatch.

    Example:
        >>> for row in zb_auto(ranks=2, microbatches=3).actions:
        ...     print(*row)
        0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    ranks, microbatches = plain_counts(ranks=ranks, microbatches=microbatches)
    cost = Cost(f=1, i=1, w=1) if cost is None else cost
    check_cost(cost)
    if memory is None:
        most = sum(sorted(cost.sizes_of(microbatches))[-ranks:])
        memory = [most * size for size in cost.on(linear(ranks)).activation]
    problem = make_problem(linear(ranks), microbatches, cost, memory, "makespan")
    return to_schedule(problem, automatic_order(problem), name="zb_auto")


def automatic_order(problem: Problem) -> Order:
    """The best order by the rules of `zb_auto`, for the objective of the problem."""
    # Tried out on the first microbatches where there are many: the rest repeats what they do.
    trial = problem.resized(min(problem.microbatches, 8 * problem.ranks))
    policies = list(_policies(len(problem.placement)))
    value, chosen = UNLIMITED, policies[0]
    for policy in policies:
        order = list_schedule(
            trial, policy, limit=value if problem.objective == "makespan" else UNLIMITED
        )
        if order is not None and order.value < value:
            value, chosen = order.value, policy
            if trial.solved(value):
                break
    best = list_schedule(problem, chosen)
    assert best is not None, "a list scheduler that has no limit ends"
    return best


def _policies(ranks: int) -> Iterator[Policy]:
    for eager, forward, weight in product((True, False), (0, 1, UNLIMITED), (UNLIMITED, 1, 0)):
        yield plain_policy(ranks, (forward, 0, weight), eager=eager)
