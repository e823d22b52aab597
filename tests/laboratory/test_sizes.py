"""Microbatches of different sizes: what they take and hold, and which is to come when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fpipe
from fpipe import Action, Cost, Op, Schedule, ScheduleError, lower_bound, search, simulate
from tests.laboratory.random_schedules import costs, schedules

SIZES = [3, 1, 2]


def test_each_action_takes_as_many_times_as_its_microbatch_is_large() -> None:
    # rank 0: F0 F0 F0 F1 F2 F2 ... and rank 1 begins when F0 has ended
    timeline = simulate(fpipe.schedules.gpipe(ranks=2, microbatches=3), Cost(1, 1, 1, sizes=SIZES))
    assert [event.start for event in timeline.events[0][:3]] == [0, 3, 4]
    assert [event.end - event.start for event in timeline.events[1]] == [3, 1, 2, 6, 2, 4]
    assert timeline.busy == (18, 18)


def test_each_microbatch_holds_as_much_as_it_is_large() -> None:
    cost = Cost(1, 1, 1, activation=10, freed_by_i=4, sizes=SIZES)
    assert simulate(fpipe.schedules.gpipe(ranks=2, microbatches=3), cost).peak == (60, 60)
    timeline = simulate(fpipe.schedules.one_f_one_b(ranks=2, microbatches=3), cost)
    assert timeline.peak == (40, 30)
    # I frees 12 of the 30 of microbatch 0 before F1 takes its 10.
    split = simulate(fpipe.schedules.zb_h1(ranks=2, microbatches=3), cost)
    assert [amount for _, amount in split.memory(1)][:3] == [30, 18, 28]
    assert "30" in timeline.to_svg()


def test_sizes_that_are_alike_are_a_unit() -> None:
    schedule = fpipe.schedules.zbv(ranks=3, microbatches=7)
    cost = Cost(2, 3, 1, comm=1, activation=5)
    twice = simulate(schedule, replace(cost, sizes=(2,) * 7))
    assert twice.makespan == simulate(schedule, Cost(4, 6, 2, comm=1, activation=5)).makespan
    assert twice.peak == simulate(schedule, Cost(4, 6, 2, comm=1, activation=10)).peak


def test_time_and_memory_of_a_microbatch_are_two_numbers() -> None:
    """Attention takes four times as long where a sequence is twice as long, and keeps twice."""
    cost = Cost(1, 1, 1, activation=10, comm=1, transfer=3, sizes=[4, 1, 9], memory_sizes=[2, 1, 3])
    timeline = simulate(fpipe.schedules.gpipe(ranks=2, microbatches=3), cost)
    assert [event.end - event.start for event in timeline.events[0][:3]] == [4, 1, 9]
    assert timeline.peak == (60, 60)
    taken = {str(each.source): each.arrives - each.sent for each in timeline.transfers}
    assert taken["0F0"] == 2 * 3 + 1 and taken["0F2"] == 3 * 3 + 1
    assert cost.sizes_of(3) == (4, 1, 9) and cost.memory_sizes_of(3) == (2, 1, 3)
    # Either may be alone: times are alike then, or what is kept grows as they do.
    alike = simulate(timeline.schedule, replace(cost, sizes=None))
    assert alike.busy == (9, 9) and alike.peak == (60, 60)
    assert replace(cost, memory_sizes=None).memory_sizes_of(3) == (4, 1, 9)
    for memory in (29, [30, 29]):
        with pytest.raises(ScheduleError, match=r"memory=29 of rank \d admits no schedule"):
            lower_bound([0, 1], 3, cost, memory=memory)
    with pytest.raises(ScheduleError, match=r"cost.memory_sizes has 3 values for 2 microbatches"):
        simulate(fpipe.schedules.gpipe(ranks=2, microbatches=2), replace(cost, sizes=None))
    with pytest.raises(ScheduleError, match=r"cost memory_sizes\[0\]=0: a microbatch of nothing"):
        Cost(1, 1, 1, memory_sizes=[0])


@settings(max_examples=50)
@given(data=st.data())
def test_no_schedule_beats_the_bound(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    shape = schedule.num_stages, schedule.num_ranks, schedule.num_microbatches
    timeline = simulate(schedule, data.draw(costs(*shape)))
    assert timeline.bound <= timeline.makespan * (1 + 1e-9)
    assert timeline.cost is not None
    span = lower_bound(
        schedule.placement, schedule.num_microbatches, timeline.cost, objective="span"
    )
    assert span <= timeline.span * (1 + 1e-9)


def test_the_bound_is_met_where_a_rank_is_always_busy() -> None:
    cost = Cost(1, 1, 1, sizes=SIZES)
    timeline = simulate(fpipe.schedules.one_f_one_b(ranks=1, microbatches=3), cost)
    assert timeline.gap == 0 and timeline.makespan == 3 * sum(SIZES)
    # The smallest comes first, and takes 1 on rank 0.
    assert lower_bound([0, 1], 3, cost) == 1 + 3 * sum(SIZES)


def test_the_bound_wants_memory_for_the_largest() -> None:
    with pytest.raises(ScheduleError, match=r"memory=2 of rank 0 admits no schedule: .* is 3"):
        lower_bound([0, 1], 2, Cost(1, 1, 1, sizes=[1, 3]), memory=2)


def test_sizes_are_as_many_as_microbatches() -> None:
    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=4)
    cost = Cost(1, 1, 1, sizes=SIZES)
    message = r"cost.sizes has 3 values for 4 microbatches: give one for each"
    with pytest.raises(ScheduleError, match=message):
        simulate(schedule, cost)
    with pytest.raises(ScheduleError, match=message):
        lower_bound([0, 1], 4, cost)
    with pytest.raises(ScheduleError, match=message):
        replace(simulate(schedule, Cost(1, 1, 1)), cost=cost)


def test_the_bound_knows_the_way_of_the_largest() -> None:
    # Alone it takes 4 to come to the last of four ranks, 4 to come back, and 1 for its last W.
    cost = Cost(1, 1, 1, sizes=[0.1, 1, 0.1])
    assert lower_bound(range(4), 3, cost, effort=0) == pytest.approx(9)
    # Two of 1 are behind each other on every rank.
    two = replace(cost, sizes=(0.1, 1, 1))
    assert lower_bound(range(4), 3, two, effort=0) == lower_bound(range(4), 2, Cost(1, 1, 1))
    assert lower_bound([0, 1], 3, Cost(1, 1, 1, sizes=SIZES), memory=iter([9, 9])) > 0


@pytest.mark.parametrize(("sizes", "best"), [((0.1, 1, 0.1), 9.2), ((0.1, 1, 1), 11.1)])
def test_the_bound_knows_that_small_ones_take_time_beside_the_largest(
    sizes: tuple[float, ...], best: float
) -> None:
    # They go before it, for 0.1 each: behind it they would take more at the end.
    cost = Cost(1, 1, 1, sizes=sizes)
    found = search(ranks=4, microbatches=3, cost=cost, placement="linear", iterations=50)
    assert lower_bound(range(4), 3, cost) == pytest.approx(best) == found.value


def test_the_bound_knows_how_long_what_is_large_is_held() -> None:
    # Of two ranks with f = i = w = 1, the first holds a microbatch of size z for 5 z, and what it
    # holds is z: 5 z² of memory times time, of which there is 4 a unit.
    cost = Cost(1, 1, 1, sizes=[4, 2, 4])
    assert lower_bound([0, 1], 3, cost, memory=4) >= 5 * (16 + 4 + 16) / 4
    assert lower_bound([0, 1], 3, cost) == pytest.approx(2 + 3 * 10)


def test_sizes_do_not_round_what_is_freed_above_what_is_kept() -> None:
    cost = Cost(1, 1, 1, activation=1.84, freed_by_i=[1.84 * 2 / 3] * 3, sizes=[0.3, 0.75])
    assert lower_bound([0, 1, 0], 2, cost) > 0
    fpipe.search(ranks=2, microbatches=2, cost=cost, placement=[0, 1, 0], iterations=5)


def test_a_search_begins_well_where_memory_is_scarce() -> None:
    sizes = [0.2 + 2.8 * (k * 7 % 16) / 15 for k in range(16)]
    cost = Cost(1, 1, 1, sizes=sizes)
    options: dict[str, Any] = {"microbatches": 16, "cost": cost, "memory": 7}
    found = fpipe.search(ranks=4, placement=range(4), iterations=0, **options)
    # All families overflow; one microbatch after the other has a gap of more than 1.
    assert found.gap < 0.35


def test_zb_auto_is_made_for_sizes() -> None:
    sizes = [1, 5, 2, 4, 1, 3]
    cost = Cost(1, 1, 1, sizes=sizes)
    made = fpipe.schedules.zb_auto(ranks=3, microbatches=6, cost=cost)
    fpipe.verify(made)
    timeline = simulate(made, cost)
    assert max(timeline.peak) <= 5 + 4 + 3
    alike = simulate(fpipe.schedules.zb_auto(ranks=3, microbatches=6), cost)
    assert timeline.makespan <= alike.makespan
    with pytest.raises(ScheduleError, match="memory=4 of rank 0 admits no schedule"):
        fpipe.schedules.zb_auto(ranks=3, microbatches=6, cost=cost, memory=4)


# ── searching ───────────────────────────────────────────────────────────────────────────────────


def interleavings(chains: Sequence[Sequence[Action]]) -> Iterator[list[Action]]:
    """All orders of the actions of several chains, each of which stays in its own order."""
    if not any(chains):
        yield []
    for at, chain in enumerate(chains):
        if chain:
            rest = [*chains[:at], chain[1:], *chains[at + 1 :]]
            yield from ([chain[0], *others] for others in interleavings(rest))


@pytest.mark.parametrize(
    ("sizes", "memory", "amounts"),
    [
        ((1, 3), None, None),
        ((2, 1), 3, None),
        ((1, 3), 3, (2, 1)),
        ((2, 1), None, (2, 1)),
        ((1, 3), 3, (1, 2)),
        ((2, 1), 3, (3, 3)),
    ],
)
def test_a_search_finds_the_best_of_all(
    sizes: tuple[int, int], memory: float | None, amounts: tuple[int, int] | None
) -> None:
    cost = Cost(f=2, i=1, w=2, comm=0.5, sizes=sizes, memory_sizes=amounts)
    rows = [
        list(interleavings([[Action(stage, op, m) for op in (Op.F, Op.I, Op.W)] for m in range(2)]))
        for stage in range(2)
    ]
    values = []
    for pair in product(*rows):
        schedule = Schedule([0, 1], pair)
        try:
            fpipe.verify(schedule)
        except ScheduleError:
            continue
        timeline = simulate(schedule, cost)
        if memory is None or max(timeline.peak) <= memory:
            values.append(timeline.makespan)
    found = fpipe.search(
        ranks=2, microbatches=2, cost=cost, memory=memory, placement=[0, 1], iterations=300
    )
    assert found.value == pytest.approx(min(values))
    assert found.bound <= min(values) + 1e-9


@settings(max_examples=40)
@given(data=st.data())
def test_a_search_is_never_worse_than_a_family(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    microbatches = data.draw(st.integers(1, 6))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=microbatches, max_size=microbatches))
    cost = Cost(f=1, i=data.draw(st.integers(1, 2)), w=1, comm=0.25, sizes=sizes)
    amounts: Any = st.lists(st.integers(1, 4), min_size=microbatches, max_size=microbatches)
    cost = replace(cost, memory_sizes=data.draw(st.none() | amounts))
    kept = cost.memory_sizes_of(microbatches)
    memory = data.draw(st.none() | st.integers(int(max(kept)), int(2 * sum(kept))))
    objective: Any = data.draw(st.sampled_from(["makespan", "span"]))
    found = fpipe.search(
        ranks=ranks,
        microbatches=microbatches,
        cost=cost,
        memory=memory,
        placement=range(ranks),
        objective=objective,
        iterations=data.draw(st.sampled_from([0, 60])),
    )
    fpipe.verify(found.schedule)
    timeline = simulate(found.schedule, cost)
    assert found.value == pytest.approx(getattr(timeline, objective))
    assert found.bound <= found.value * (1 + 1e-9)
    assert memory is None or max(timeline.peak) <= memory * (1 + 1e-9)
    for name in ("gpipe", "one_f_one_b", "zb_h1"):
        other = simulate(fpipe.schedules.get(name, ranks=ranks, microbatches=microbatches), cost)
        if memory is None or max(other.peak) <= memory:
            assert found.value <= getattr(other, objective) * (1 + 1e-9)


def test_a_search_arranges_what_comes_in_a_bad_order() -> None:
    sizes = [9, 1, 8, 2, 7, 3, 6, 4]
    options: dict[str, Any] = {"ranks": 4, "microbatches": 8, "placement": range(4), "memory": 30}
    found, again = (
        fpipe.search(cost=Cost(1, 1, 1, sizes=sizes), iterations=300, **options) for _ in range(2)
    )
    assert found.schedule == again.schedule
    usual = simulate(fpipe.schedules.zb_h1(ranks=4, microbatches=8), Cost(1, 1, 1, sizes=sizes))
    assert found.value < 0.75 * usual.makespan and found.gap < 0.08
    # Which comes when does not depend on the order in which they are given.
    other = fpipe.search(cost=Cost(1, 1, 1, sizes=sorted(sizes)), iterations=300, **options)
    assert other.value == pytest.approx(found.value, rel=0.05)


def test_a_large_search_takes_sizes() -> None:
    sizes = [1 + k % 7 for k in range(256)]
    options: dict[str, Any] = {"ranks": 16, "microbatches": 256, "placement": range(16)}
    found = fpipe.search(cost=Cost(1, 1, 1, sizes=sizes), iterations=3, **options)
    fpipe.verify(found.schedule)
    assert (
        found.value
        <= simulate(
            fpipe.schedules.zb_h1(ranks=16, microbatches=256), Cost(1, 1, 1, sizes=sizes)
        ).makespan
    )
