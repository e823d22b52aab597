"""Trials in which times vary: an independent simulator, means and bounds, robust searches."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from statistics import fmean, pstdev
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fpipe
from fpipe import Action, Cost, Jitter, Schedule, ScheduleError, schedules, search, simulate
from fpipe.schedule.orders.evaluator import make_evaluator
from fpipe.schedule.orders.problem import make_problem, to_order, to_schedule
from fpipe.schedule.searching import robust
from fpipe.schedule.searching.result import USUAL
from fpipe.schedule.searching.robust import MeanEvaluator
from fpipe.schedule.simulation.jitter import Draws, trial_makespans
from fpipe.schedule.simulator import with_whole_stage
from tests.laboratory.relaxation import relaxed
from tests.laboratory.test_links import linked
from tests.laboratory.test_whole_stage import every_row

UNIT = Cost(f=1, i=1, w=1)


@settings(max_examples=40)
@given(case=linked(), each=st.sampled_from([0.0, 0.1]), rank=st.sampled_from([0.0, 0.2]))
def test_every_trial_agrees_with_one_that_relaxes_rules(
    case: tuple[Schedule, Cost], each: float, rank: float
) -> None:
    schedule, cost = case
    schedule = with_whole_stage(schedule, cost)
    jitter = Jitter(each=each, rank=rank, stalls=0.2, stall=3)
    timeline = simulate(schedule, cost, jitter=jitter, trials=3, seed=5)
    draws = Draws(jitter, 3, seed=5)
    for trial, makespan in enumerate(timeline.trials):

        def shaken(rank: int, action: Action, time: float, trial: int = trial) -> float:
            factors, stalls = draws.factors(action, rank)
            return time * factors[trial] + stalls[trial] if time else 0.0

        times = relaxed(schedule, cost, shaken)
        begun = min(start for start, _ in times.values())
        assert makespan == pytest.approx(max(end for _, end in times.values()) - begun)
    # The rest of the timeline is that without jitter.
    assert timeline.events == simulate(schedule, cost).events


def test_without_any_jitter_all_trials_are_the_makespan() -> None:
    timeline = simulate(schedules.zbv(ranks=3, microbatches=6), UNIT, jitter=0, trials=4)
    assert timeline.trials == pytest.approx([timeline.makespan] * 4)
    plain = simulate(timeline.schedule, UNIT)
    assert plain.trials == () and plain.mean == plain.makespan and plain.spread == 0
    assert "mean" in repr(timeline) and "mean" not in repr(plain)


@pytest.mark.parametrize("jitter", [0.1, Jitter(rank=0.1), Jitter(stalls=0.05, stall=5)])
def test_a_mean_is_not_below_the_makespan(jitter: Jitter | float) -> None:
    for name in ("gpipe", "zb_h1", "zbv"):
        schedule = schedules.get(name, ranks=3, microbatches=6)
        timeline = simulate(schedule, UNIT, jitter=jitter, trials=30)
        assert timeline.mean >= timeline.makespan * (1 - 1e-12)
        assert timeline.mean == fmean(timeline.trials)
        assert timeline.spread == pstdev(timeline.trials) > 0


def test_factors_have_their_mean_and_their_deviation() -> None:
    draws = Draws(Jitter(each=0.2), 4000, seed=1)
    factors, stalls = draws.factors(Action.parse("0F0"), 0)
    assert fmean(factors) == pytest.approx(1.0, abs=1e-12)
    assert pstdev(factors) == pytest.approx(0.2, abs=0.02)
    assert not any(stalls) and min(factors) > 0
    again = Draws(Jitter(each=0.2), 4000, seed=1)
    assert again.factors(Action.parse("0F0"), 0)[0] == factors
    assert again.factors(Action.parse("0F1"), 0)[0] != factors
    # I and B meet the same luck.
    assert again.factors(Action.parse("0I1"), 0) == again.factors(Action.parse("0B1"), 0)
    _, rare = Draws(Jitter(stalls=0.1, stall=7), 4000, seed=1).factors(Action.parse("0F0"), 0)
    assert set(rare) == {0, 7} and 300 < sum(map(bool, rare)) < 500


def test_one_rank_has_one_factor_in_a_trial() -> None:
    draws = Draws(Jitter(rank=0.3), 5, seed=0)
    first, _ = draws.factors(Action.parse("0F0"), 2)
    assert draws.factors(Action.parse("3B1"), 2)[0] == first
    assert draws.factors(Action.parse("3B1"), 1)[0] != first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"jitter": -0.1}, r"jitter each=-0\.1 must be a finite number, at least 0"),
        ({"jitter": "much"}, r"jitter each='much' must be"),
        ({"jitter": 0.1, "trials": 0}, r"trials=0 must be an integer, 1 or more"),
        ({"jitter": 0.1, "seed": 0.5}, r"seed=0\.5 must be an integer"),
    ],
)
def test_a_bad_jitter_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(schedules.gpipe(ranks=2, microbatches=2), UNIT, **arguments)
    with pytest.raises(ScheduleError, match=r"jitter stalls=2 must be from 0 to 1"):
        Jitter(stalls=2)


def test_jitter_decides_between_equal_makespans_only() -> None:
    cost = Cost(f=[3, 2], i=[1, 4], w=[2, 3], comm=1)
    result = search(ranks=2, microbatches=2, cost=cost, placement="linear", iterations=100)
    values = []
    for rows in product(every_row(0), every_row(1)):
        try:
            values.append(simulate(Schedule([0, 1], rows), cost).makespan)
        except ScheduleError:
            continue  # which waits for itself
    assert result.value == min(values) == result.timeline.makespan
    assert result.timeline.trials == ()


def test_a_robust_search_trades_the_makespan_for_the_mean() -> None:
    """Long stalls strike two stages a rank twice as often."""
    cost = Cost(f=10, i=10, w=10, comm=1)
    jitter = Jitter(each=0.1, stalls=0.02, stall=40)
    arguments: dict[str, Any] = {
        "ranks": 4, "microbatches": 8, "cost": cost, "memory": 4, "iterations": 80,
    }  # fmt: skip
    fast = search(**arguments)
    steady = search(**arguments, objective="robust", jitter=jitter)
    shaken = simulate(fast.schedule, cost, jitter=jitter)
    assert fast.value < steady.timeline.makespan and steady.value < 0.97 * shaken.mean
    assert steady.value == simulate(steady.schedule, cost, jitter=jitter).mean
    assert steady.bound <= steady.value and steady.objective == "robust"
    assert steady == search(**arguments, objective="robust", jitter=jitter)
    for name in ("zb_h1", "zbv", "one_f_one_b"):
        family = schedules.get(name, ranks=4, microbatches=8)
        assert steady.value <= simulate(family, cost, jitter=jitter).mean * (1 + 1e-9)


def test_a_robust_search_knows_whole_stage_work_and_fused_backwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cost = Cost(f=1, i=1, w=1, b=1.7, reduce_grad=2, update=1, comm=0.2)
    result = search(ranks=2, microbatches=4, cost=cost, objective="robust", iterations=40)
    fpipe.verify(result.schedule)
    assert result.schedule.has_updates and result.value >= result.bound
    monkeypatch.setattr(robust, "LARGE", 0)  # as where there are more actions
    large = search(
        ranks=4, microbatches=50, cost=UNIT, objective="robust", placement="linear", iterations=2
    )
    assert large.value >= large.bound


def test_a_result_says_what_it_loses_beside_the_best_family() -> None:
    cost = Cost(f=10, i=12, w=8, comm=1)
    result = search(ranks=3, microbatches=6, cost=cost, memory=3, iterations=20)
    family = result.best_family
    assert family is not None and max(family.peak) <= 3
    means = []
    for name in schedules.FAMILIES:
        try:
            schedule = schedules.get(name, ranks=3, microbatches=6)
        except ScheduleError:
            continue
        timeline = simulate(schedule, cost, jitter=USUAL)
        if max(timeline.peak) <= 3:
            means.append(timeline.mean)
    assert family.mean <= min(means)
    assert result.loss == pytest.approx(result.shaken.mean / family.mean - 1)
    odd = search(ranks=2, microbatches=2, cost=UNIT, placement=[0, 1, 1], iterations=1)
    assert odd.best_family is None
    with pytest.raises(ScheduleError, match="no named family fits"):
        _ = odd.loss
    with pytest.raises(ScheduleError, match=r"objective='mean' must be"):
        search(ranks=2, microbatches=2, cost=UNIT, objective="mean")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "world",
    [
        {},
        {"pair": 0.6},
        {"transfer": 3, "shared": True},
        {"transfer": 2, "blocking": True},
        {"pair": 0.7, "transfer": 2, "shared": True, "blocking": True},
    ],
)
def test_a_robust_search_plays_the_trials_of_a_simulation(world: dict[str, Any]) -> None:
    """Where actions run together, each trial took the times without jitter."""
    cost = Cost(f=2, i=3, w=2, comm=1, **world)
    schedule = schedules.dualpipev(ranks=2, microbatches=6)
    problem = make_problem(schedule.placement, 6, cost, None, "makespan")
    order = to_order(problem, schedule)
    usual, jitter = make_evaluator(problem), Jitter(each=0.2, rank=0.1)
    mean, _ = MeanEvaluator(usual, jitter, seed=3).times(order.rows, order.fused)
    rows = to_schedule(problem, order, "own").actions
    draws = Draws(jitter, robust._TRIALS, seed=3)
    trials = trial_makespans(rows, problem.costs, problem.sizes, draws)
    assert mean == pytest.approx(fmean(trials))
    assert mean > usual.times(order.rows, order.fused)[0]


def test_remat_and_robust_go_together() -> None:
    cost = replace(UNIT, kept=0.1)
    result = search(
        ranks=2, microbatches=4, cost=cost, memory=1.2, placement="linear", remat=True,
        objective="robust", iterations=10,
    )  # fmt: skip
    assert result.remat is not None and result.value == result.timeline.mean
