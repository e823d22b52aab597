"""The lower bound: below every schedule, and met where a schedule is known to be the best."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpipe import Cost, ScheduleError, lower_bound, schedules, simulate
from fpipe.schedule.placements import linear, looped, vee
from tests.laboratory.exhaustive import best

UNIT = Cost(f=1, i=1, w=1)
TINY = [
    ((0, 1), 2),
    ((0, 1, 2), 1),
    ((0, 0), 2),
    ((0, 1, 1, 0), 1),
    ((0, 1, 0, 1), 1),
    ((1, 0, 1), 1),
    ((0, 0, 1), 1),
    ((0,), 3),
]


@settings(max_examples=50)
@given(data=st.data())
def test_no_schedule_of_a_tiny_case_beats_it(data: st.DataObject) -> None:
    placement, microbatches = data.draw(st.sampled_from(TINY))
    stages = len(placement)

    def each(least: int, most: int) -> list[int]:
        return data.draw(
            st.lists(st.integers(least, most), min_size=stages, max_size=stages), label="costs"
        )

    activation = each(1, 2)
    freed = [data.draw(st.sampled_from([0, 0, size / 2, size])) for size in activation]
    cost = Cost(
        each(0, 4),
        each(0, 4),
        each(0, 4),
        comm=data.draw(st.integers(0, 3)),
        b=data.draw(st.one_of(st.none(), st.just(each(0, 6)))),
        activation=activation,
        freed_by_i=freed,
    )
    least = max(
        sum(a for a, owner in zip(activation, placement, strict=True) if owner == rank)
        for rank in set(placement)
    )
    memory = data.draw(st.sampled_from([least, least + 1, 2 * least, 100]))
    for span in (False, True):
        bound = lower_bound(
            placement, microbatches, cost, memory, objective="span" if span else "makespan"
        )
        assert bound <= best(placement, microbatches, cost, memory, span=span) + 1e-9


@pytest.mark.parametrize("memory", [1, 2])
@pytest.mark.parametrize("cost", [Cost(1, 1, 1), Cost(1, 2, 1, comm=1), Cost(2, 1, 3)])
def test_it_holds_where_microbatches_take_turns(cost: Cost, memory: int) -> None:
    assert lower_bound((0, 1), 3, cost, memory) <= best((0, 1), 3, cost, memory)


def test_it_is_exact_where_one_microbatch_fits() -> None:
    # Rank 0 goes F, round trip of rank 1, I, W, three times over: 3 * (1 + 2 + 2).
    assert lower_bound((0, 1), 3, UNIT, memory=1) == best((0, 1), 3, UNIT, 1) == 15


@pytest.mark.parametrize(
    ("ranks", "cost"),
    [
        (1, Cost(10, 12, 8)),
        (2, UNIT),
        (2, Cost(1, 1, 1, comm=2)),
        (3, Cost(10, 12, 8)),
        (4, Cost(2, 1, 1)),
        (5, UNIT),
        (4, Cost(1, 1, 1, comm=2)),
    ],
)
def test_no_family_beats_it(ranks: int, cost: Cost) -> None:
    for name in schedules.FAMILIES:
        for microbatches in (ranks, 2 * ranks) if ranks < 4 else (ranks,):
            timeline = simulate(schedules.get(name, ranks=ranks, microbatches=microbatches), cost)
            assert timeline.bound <= timeline.makespan + 1e-9, timeline
            bound = lower_bound(
                timeline.schedule.placement, microbatches, cost, timeline.peak, objective="span"
            )
            assert bound <= timeline.span + 1e-9, timeline


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero_bubble_schedules_meet_it_without_latency(ranks: int) -> None:
    for cost in (UNIT, Cost(10, 12, 8), Cost(2, 2, 1)):
        assert simulate(schedules.zb_h1(ranks=ranks, microbatches=2 * ranks), cost).gap == 0
    for name in ("zb_h2", "zbv", "interleaved_zero_bubble"):
        schedule = schedules.get(name, ranks=ranks, microbatches=2 * ranks)
        assert simulate(schedule, UNIT).gap == pytest.approx(0)


def test_span_needs_no_fill_and_no_drain() -> None:
    assert lower_bound(linear(4), 8, UNIT, 7, objective="span") == 24
    assert lower_bound(linear(4), 8, UNIT, 7) == 27
    assert lower_bound(linear(4), 8, UNIT, 4, objective="span") == 27


def test_less_memory_never_lowers_it() -> None:
    for placement in (linear(6), looped(6, 2), vee(6)):
        for cost in (UNIT, Cost(10, 12, 8, comm=1)):
            # By the formulas; what the states add depends on how many there are to look at.
            bounds = [lower_bound(placement, 18, cost, held, effort=0) for held in range(1, 20)]
            assert bounds == sorted(bounds, reverse=True)
            assert bounds[-1] == lower_bound(placement, 18, cost)


def test_each_rank_may_have_its_own_memory() -> None:
    assert lower_bound(linear(2), 4, UNIT, [1, 4]) == lower_bound(linear(2), 4, UNIT, 1)
    # Rank 1 cannot hold back more than its last W while the last gradient travels to rank 0.
    assert lower_bound(linear(2), 4, UNIT, [4, 1]) == lower_bound(linear(2), 4, UNIT) + 1


def test_unequal_activations_fall_back_on_the_plain_area() -> None:
    # Rank 0 holds 2 for 13 and 1 for 4, three times; memory is 3.
    cost = Cost([2] * 4, [1] * 4, [1] * 4, activation=[2, 1, 1, 1])
    assert lower_bound(vee(2), 3, cost, 3) >= 3 * (2 * 13 + 1 * 4) / 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"microbatches": 0}, "microbatches=0 must be an integer, 1 or more"),
        ({"microbatches": True}, "microbatches=True must be an integer, 1 or more"),
        ({"placement": []}, r"placement=\(\) must have the rank of each stage"),
        ({"placement": [0, 1.0]}, r"placement=\(0, 1.0\) must have the rank of each stage"),
        ({"cost": 3}, "cost=3 is an int: make one with fpipe.Cost"),
        ({"objective": "time"}, "objective='time' must be 'makespan' or 'span'"),
        ({"memory": [1]}, "memory has 1 values for 2 ranks"),
        ({"memory": 0}, "memory=0 of rank 0 must be a number above 0"),
        ({"memory": ["1", 1]}, "memory='1' of rank 0 must be a number above 0"),
        ({"memory": {0: 2, 1: 2}}, r"memory=\{0: 2, 1: 2\} is a dict, which has no order"),
        (
            {"placement": 2},
            "placement=2 is an int: it must be a sequence with the rank",
        ),
        ({"placement": {0: 1, 1: 0}}, "is a dict: it must be a sequence"),
        ({"effort": -1}, "effort=-1 must be an integer, 0 or more"),
        ({"memory": [2, 0.5]}, r"memory=0.5 of rank 1 admits no schedule: .* stages \[1\]"),
    ],
)
def test_a_bad_argument_is_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        lower_bound(
            **{"placement": (0, 1), "microbatches": 2, "cost": UNIT, "memory": None, **arguments}  # type: ignore[arg-type]
        )


def test_memory_may_be_any_real_number_however_large() -> None:
    free = lower_bound([0, 1], 4, UNIT)
    assert lower_bound([0, 1], 4, UNIT, 1e308) == lower_bound([0, 1], 4, UNIT, 10**400) == free
    one: Any = np.float32(1)
    assert lower_bound([0, 1], 4, UNIT, one) == lower_bound([0, 1], 4, UNIT, 1)


def test_integers_may_be_those_of_numpy() -> None:
    two, four, many = np.array([2, 4, 500])
    given = lower_bound(list(np.arange(2)), four, UNIT, 1, effort=many)
    assert given == lower_bound([0, 1], 4, UNIT, 1, effort=500)
    assert lower_bound([0, 1], two, UNIT) == lower_bound([0, 1], 2, UNIT)


def test_ranks_may_have_no_stage() -> None:
    # Rank 0 was looked at like any other: an IndexError.
    cost = Cost([1, 1], [1, 1], [1, 1], activation=[1, 1])
    for placement in ([0, 1], [1, 2], [0, 3], [2, 4]):
        assert lower_bound(placement, 3, cost, memory=1) == best((0, 1), 3, cost, 1)
        assert lower_bound(placement, 3, cost, memory=1, objective="span") == 15
        assert lower_bound(placement, 3, Cost(0, 0, 0, activation=[1, 1]), memory=1) == 0


def test_the_unit_of_memory_plays_no_part() -> None:
    for unit in (1e-50, 1e-6, 1e50):
        cost = Cost(1, 1, 1, activation=unit)
        assert lower_bound(linear(4), 8, cost, 2 * unit) == lower_bound(linear(4), 8, UNIT, 2)


def test_where_nothing_is_kept_no_memory_is_enough() -> None:
    for cost in (
        Cost(1, 1, 1, activation=0),
        Cost(1, 1, 1, activation=[0, 0, 0], freed_by_i=[-1, 0, -1]),
    ):
        assert lower_bound([0, 1, 0], 4, cost, 0) == lower_bound([0, 1, 0], 4, cost) == 16
    timeline = simulate(schedules.one_f_one_b(ranks=2, microbatches=3), Cost(1, 1, 1, activation=0))
    assert timeline.peak == (0, 0)
    assert timeline.bound == 10
