"""An F and a B that run together: simulation, jitter, bounds, search, DualPipeV's own table."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe import (
    Action,
    Cost,
    Jitter,
    Op,
    Schedule,
    ScheduleError,
    Timeline,
    lower_bound,
    schedules,
    search,
    simulate,
)
from fpipe.schedule.orders.evaluator import make_evaluator
from fpipe.schedule.orders.problem import make_problem, to_order
from fpipe.schedule.simulation.clocks import partner_of
from fpipe.schedule.simulation.events import partners
from fpipe.schedule.simulation.jitter import Draws
from fpipe.schedule.simulator import with_whole_stage
from tests.laboratory.relaxation import Place, relaxed
from tests.laboratory.test_links import linked


@st.composite
def paired(draw: st.DrawFn) -> tuple[Schedule, Cost]:
    schedule, cost = draw(linked())
    cost = replace(cost, f=draw(st.integers(1, 3)), b=draw(st.integers(1, 4)))
    cost = replace(cost, pair=draw(st.sampled_from([0.5, 0.75, 1.0])))
    return with_whole_stage(schedule, cost), cost


def pairs_of(timeline: Timeline) -> list[Place]:
    return [
        (rank, at)
        for rank, row in enumerate(timeline.events)
        for at, other in partners(row, timeline.cost).items()
        if other > at
    ]


@settings(max_examples=40)
@given(case=paired())
def test_simulation_agrees_with_one_that_relaxes_rules(case: tuple[Schedule, Cost]) -> None:
    schedule, cost = case
    timeline = simulate(schedule, cost)
    pairs = pairs_of(timeline)
    for rank, at in pairs:
        assert partner_of(schedule.actions[rank], at) == schedule.actions[rank][at + 1]
    expected = relaxed(schedule, cost, pairs=pairs)
    for (rank, at), (start, end) in expected.items():
        event = timeline.events[rank][at]
        if event.action.op != Op.RESHARD:  # which takes no time, whenever it is
            assert (event.start, event.end) == pytest.approx((start, end))
    assert timeline.bound <= timeline.makespan + 1e-9
    assert all(bubble >= -1e-9 for bubble in timeline.bubble)
    for before, after in zip(timeline.critical_path, timeline.critical_path[1:], strict=False):
        assert before.end <= after.start + 1e-9


@settings(max_examples=30)
@given(case=paired())
def test_trials_agree_with_one_that_relaxes_rules(case: tuple[Schedule, Cost]) -> None:
    schedule, cost = case
    jitter = Jitter(each=0.2)
    timeline = simulate(schedule, cost, jitter=jitter, trials=2)
    draws = Draws(jitter, 2, seed=0)
    for trial, makespan in enumerate(timeline.trials):

        def shaken(rank: int, action: Action, time: float, trial: int = trial) -> float:
            return time * draws.factors(action, rank)[0][trial]

        times = relaxed(schedule, cost, shaken, pairs_of(timeline))
        begun = min(start for start, _ in times.values())
        assert makespan == pytest.approx(max(end for _, end in times.values()) - begun)


@settings(max_examples=50)
@given(case=paired(), span=st.booleans())
def test_an_order_has_the_value_of_its_schedule(case: tuple[Schedule, Cost], span: bool) -> None:
    schedule, cost = case
    objective: Any = "span" if span else "makespan"
    problem = make_problem(schedule.placement, schedule.num_microbatches, cost, None, objective)
    order = to_order(problem, schedule)
    value, ends = make_evaluator(problem).times(order.rows, order.fused)
    assert value == pytest.approx(problem.played(order).value)
    make_evaluator(problem).critical(replace(order, value=value), ends)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("pair", [1.0, 0.8, 0.7])
@pytest.mark.parametrize("times", [(1, 1, 1), (1, 1.2, 0.8)])
def test_dualpipev_has_its_published_bubble(
    ranks: int, pair: float, times: tuple[float, float, float]
) -> None:
    """(PP/2 - 1)(F&B + B - 3W) for PP stages, https://github.com/deepseek-ai/DualPipe: of chunks,
    of which a rank has two. It holds where the pairs are what a rank does most."""
    f, i, w = times
    dualpipev = schedules.dualpipev(ranks=ranks, microbatches=4 * ranks)
    timeline = simulate(dualpipev, Cost(2 * f, 2 * i, 2 * w, pair=pair))
    together = pair * (f + i + w)
    assert max(timeline.bubble) == pytest.approx((ranks - 1) * (together + (i + w) - 3 * w))
    assert max(timeline.peak) <= ranks + 0.5  # published: PP + 1 chunks


def test_a_pair_starts_and_ends_together() -> None:
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    schedule = Schedule([0, 1], [[Action.parse(word) for word in row] for row in rows])
    timeline = simulate(schedule, Cost(f=2, i=1, w=1, pair=0.5))
    # 0F1 waits for the input of 0B0, which rank 1 has ready at 6.
    assert [(event.start, event.end) for event in timeline.events[0]] == [
        (0, 2), (6, 8), (6, 8), (12, 14),
    ]  # fmt: skip
    assert timeline.busy == (6, 8) and timeline.idle(0) == ((2, 6), (8, 12))
    assert [str(event.action) for event in timeline.critical_path] == (
        ["0F0", "1F0", "1B0", "0F1", "1F1", "1B1", "0B1"]
    )
    assert timeline.to_svg() != simulate(schedule, Cost(f=2, i=1, w=1)).to_svg()


def test_pairs_that_would_wait_in_a_circle_run_one_after_the_other() -> None:
    gpipe = schedules.gpipe(ranks=2, microbatches=3)
    timeline = simulate(gpipe, Cost(f=2, i=1, w=1, pair=0.5))
    # The last F of rank 0 cannot wait for a backward that needs it; on the last rank it can.
    assert pairs_of(timeline) == [(1, 2)]
    same = Schedule([0], [[Action.parse(word) for word in ["0F0", "0B0", "0F1", "0B1"]]])
    assert not pairs_of(simulate(same, Cost(1, 1, 1, pair=0.5)))  # each of one microbatch


def every_fused(stage: int) -> list[list[Action]]:
    """The orders of F and B of two microbatches of a stage."""
    names = (f"{stage}F0", f"{stage}B0", f"{stage}F1", f"{stage}B1")
    orders = [(0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 3, 1), (2, 0, 1, 3), (2, 0, 3, 1), (2, 3, 0, 1)]
    return [[Action.parse(names[at]) for at in order] for order in orders]


def test_a_search_pairs_where_that_is_best() -> None:
    cost = Cost(f=[3, 2], i=[1, 4], w=[2, 3], comm=1, pair=0.6)
    values = []
    for rows in product(every_fused(0), every_fused(1)):
        try:
            values.append(simulate(Schedule([0, 1], rows), cost).makespan)
        except ScheduleError:
            continue  # which waits for itself
    result = search(ranks=2, microbatches=2, cost=cost, placement="linear", iterations=150)
    assert result.bound <= result.value <= min(values) + 1e-9
    assert result.value == simulate(result.schedule, cost).makespan


def test_a_search_is_no_worse_than_the_families() -> None:
    cost = Cost(f=1, i=1, w=1, comm=0.1, pair=0.7)
    result = search(ranks=3, microbatches=8, cost=cost, memory=3.5, iterations=30)
    for name in ("dualpipev", "zbv", "one_f_one_b", "interleaved_1f1b"):
        family = schedules.get(name, ranks=3, microbatches=8)
        assert result.value <= simulate(family, cost).makespan * (1 + 1e-9)
    assert result.bound <= result.value
    assert lower_bound([0, 1, 2], 8, cost) < lower_bound([0, 1, 2], 8, replace(cost, pair=None))


def test_pairs_are_written_and_read(tmp_path: Path) -> None:
    cost = Cost(f=1, i=1, w=1, pair=0.7)
    cost.to_json(tmp_path / "cost.json")
    assert Cost.from_json(tmp_path / "cost.json") == cost
    assert json.loads(cost.to_json())["pair"] == 0.7


@pytest.mark.parametrize("pair", [0, 1.1, "half", [0.7]])
def test_a_pair_takes_a_share(pair: Any) -> None:
    with pytest.raises(ScheduleError, match=r"pair=.* must be above 0 and at most 1, or None"):
        Cost(f=1, i=1, w=1, pair=pair)
