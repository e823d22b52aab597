"""Random schedules that can run, and a slow simulator that shares no code with fpipe's."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from fpipe import Action, Cost, Op, Schedule


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any placement of a few stages, any order that can run, B or I and W as it falls."""
    ranks = draw(st.integers(1, 4))
    extra = draw(st.lists(st.integers(0, ranks - 1), max_size=4))
    placement = draw(st.permutations([*range(ranks), *extra]))
    microbatches = draw(st.integers(1, 4))
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    ready = [Action(0, Op.F, microbatch) for microbatch in range(microbatches)]
    while ready:
        action = ready.pop(draw(st.integers(0, len(ready) - 1)))
        rows[placement[action.stage]].append(action)
        ready += _follow(action, len(placement), draw(st.booleans()))
    return Schedule(placement, rows)


def _follow(action: Action, stages: int, split: bool) -> list[Action]:
    """What an action makes ready."""
    stage, op, microbatch = action
    if op == Op.F and stage + 1 < stages:
        return [Action(stage + 1, Op.F, microbatch)]
    follow = [Action(stage, Op.W, microbatch)] if op == Op.I else []
    if op == Op.F:
        follow.append(Action(stage, Op.I if split else Op.B, microbatch))
    elif op != Op.W and stage:
        follow.append(Action(stage - 1, Op.I if split else Op.B, microbatch))
    return follow


@st.composite
def costs(draw: st.DrawFn, stages: int, ranks: int, microbatches: int | None = None) -> Cost:
    """Small integers, so that time can be counted in ticks; zeros among them.

    With a number of microbatches these may have sizes.
    """

    def each(least: int = 0) -> list[int]:
        return draw(st.lists(st.integers(least, 4), min_size=stages, max_size=stages))

    table = st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)
    comm: int | Sequence[Sequence[int]] = draw(
        st.one_of(st.integers(0, 3), st.lists(table, min_size=ranks, max_size=ranks))
    )
    sizes = None
    if microbatches is not None and draw(st.booleans()):
        sizes = draw(st.lists(st.integers(1, 3), min_size=microbatches, max_size=microbatches))
    amounts = None
    if microbatches is not None and draw(st.booleans()):
        amounts = draw(st.lists(st.integers(1, 3), min_size=microbatches, max_size=microbatches))
    b = draw(st.one_of(st.none(), st.just(each())))
    return Cost(each(), each(), each(), comm=comm, b=b, sizes=sizes, memory_sizes=amounts)


def tick_by_tick(schedule: Schedule, cost: Cost) -> dict[Action, tuple[int, int]]:
    """Start and end of each action, found by looking at every rank at every tick."""
    costs = cost.on(schedule.placement)
    duration = {Op.F: costs.f, Op.I: costs.i, Op.W: costs.w, Op.B: costs.b}
    times: dict[Action, tuple[int, int]] = {}
    todo = [list(row) for row in schedule.actions]
    free = [0] * len(todo)
    now = 0
    while any(todo):
        moved = True
        while moved:  # an action of no time can start another within the tick
            moved = False
            for rank, row in enumerate(todo):
                if row and free[rank] <= now and _arrived(row[0], schedule, cost, times, now):
                    action = row.pop(0)
                    size = 1 if cost.sizes is None else cost.sizes[action.microbatch or 0]
                    free[rank] = now + int(duration[action.op][action.stage] * size)
                    times[action] = (now, free[rank])
                    moved = True
        now += 1
    return times


def _arrived(
    action: Action,
    schedule: Schedule,
    cost: Cost,
    times: dict[Action, tuple[int, int]],
    now: int,
) -> bool:
    stage, op, microbatch = action
    if op == Op.W:
        return True  # its I stands before it in the row
    source = stage - 1 if op == Op.F else stage + 1
    if not 0 <= source < schedule.num_stages:
        return True
    latency = cost.hop(schedule.placement[source], schedule.placement[stage])
    made = [Op.F] if op == Op.F else [Op.I, Op.B]
    ends = [times[key][1] for kind in made if (key := Action(source, kind, microbatch)) in times]
    return any(end + latency <= now for end in ends)
