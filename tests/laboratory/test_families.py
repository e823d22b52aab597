"""The families of the laboratory: their grids, and the bubbles and peaks their docstrings state."""

from __future__ import annotations

import pytest

import fpipe
from fpipe import Cost, Schedule, ScheduleError, simulate
from fpipe.schedule.placements import vee
from fpipe.schedules import forward_only, group_1f1b, v_half, v_min, zb_auto, zb_h1

RANKS = range(1, 17)


def microbatches(ranks: int) -> list[int]:
    return sorted({1, max(1, ranks // 2), max(1, ranks - 1), ranks, ranks + 1, 2 * ranks + 3})


def bubble(schedule: Schedule, cost: Cost) -> float:
    """Makespan less the work of one rank."""
    timeline = simulate(schedule, cost)
    return timeline.makespan - timeline.busy[0]


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.actions]


def test_v_min_sends_each_microbatch_down_and_up_without_a_stop() -> None:
    # Slots of microbatch 0 on four ranks; the next one follows six slots later.
    # rank 0: F . . . . . . F I . . . . . . I
    # rank 1: . F . . . . F . . I . . . . I
    # rank 2: . . F . . F . . . . I . . I
    # rank 3: . . . F F . . . . . . I I
    assert rows(v_min(ranks=4, microbatches=1)) == [
        "0F0 7F0 7I0 7W0 0I0 0W0",
        "1F0 6F0 6I0 6W0 1I0 1W0",
        "2F0 5F0 5I0 5W0 2I0 2W0",
        "3F0 4F0 4I0 3I0 4W0 3W0",
    ]


@pytest.mark.parametrize("ranks", RANKS)
def test_v_min_has_the_bubble_and_the_peak_that_it_states(ranks: int) -> None:
    expected = 0 if ranks == 1 else 8 * ranks - (8 if ranks % 3 == 0 else 10)
    for count in microbatches(ranks):
        timeline = simulate(v_min(ranks=ranks, microbatches=count), Cost(4, 4, 4))
        assert max(timeline.peak) <= min(count, (ranks + 4) // 3)
        if count >= 2 * ranks:
            assert max(timeline.peak) == (ranks + 4) // 3
        if count >= ranks:
            assert timeline.makespan - 12 * count == expected


@pytest.mark.parametrize("ranks", RANKS)
def test_v_half_has_the_bubble_and_the_peak_that_it_states(ranks: int) -> None:
    expected = 0 if ranks == 1 else 7 * ranks - (9 if ranks % 2 else 6)
    for count in microbatches(ranks):
        timeline = simulate(v_half(ranks=ranks, microbatches=count), Cost(4, 4, 4))
        assert max(timeline.peak) <= min(count, (ranks + 2) // 2)
        if count >= 2 * ranks:
            assert max(timeline.peak) == (ranks + 2) // 2
        if count >= ranks:
            assert timeline.makespan - 12 * count == expected


def test_group_1f1b_goes_round_in_short_groups() -> None:
    assert rows(group_1f1b(ranks=2, microbatches=2)) == [
        "0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1",
        "1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1I0 1W0 1I1 1W1",
    ]
    assert rows(group_1f1b(ranks=2, microbatches=2, group=1)) == [
        "0F0 2F0 0F1 2I0 2W0 2F1 0I0 0W0 2I1 2W1 0I1 0W1",
        "1F0 3F0 3I0 3W0 1F1 1I0 1W0 3F1 3I1 3W1 1I1 1W1",
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_group_1f1b_has_the_bubble_and_the_peak_that_it_states(ranks: int, stages: int) -> None:
    for count in (ranks, 2 * ranks, 4 * ranks):
        for cost in (Cost(6, 6, 6), Cost(60, 72, 48)):
            schedule = group_1f1b(ranks=ranks, microbatches=count, stages_per_rank=stages)
            assert isinstance(cost.f, int) and isinstance(cost.i, int)
            expected = (ranks - 1) * (cost.f + cost.i) / stages
            assert bubble(schedule, cost) == pytest.approx(expected)
            assert max(simulate(schedule, cost).peak) == pytest.approx(ranks)
        for group in {size for size in (ranks // 2, ranks) if size and count % size == 0}:
            schedule = group_1f1b(
                ranks=ranks, microbatches=count, stages_per_rank=stages, group=group
            )
            most = min(count, ((stages - 1) * group + ranks) / stages)
            assert max(simulate(schedule, Cost(1, 1, 1)).peak) == pytest.approx(most)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "group"), [(4, 8, 4), (4, 6, 3), (4, 5, 5), (6, 4, 4), (8, 22, 11)]
)
def test_group_1f1b_takes_the_group_nearest_the_ranks(
    ranks: int, microbatches: int, group: int
) -> None:
    assert group_1f1b(ranks=ranks, microbatches=microbatches) == group_1f1b(
        ranks=ranks, microbatches=microbatches, group=group
    )


def test_group_1f1b_wants_whole_groups() -> None:
    with pytest.raises(
        ScheduleError, match=r"microbatches=5 must be a multiple of group=2: take 6"
    ):
        group_1f1b(ranks=4, microbatches=5, group=2)
    with pytest.raises(ScheduleError, match=r"group=1 must be at least ranks // 2 = 2"):
        group_1f1b(ranks=4, microbatches=4, group=1)
    with pytest.raises(ScheduleError, match=r"group=0 must be an integer, 1 or more"):
        group_1f1b(ranks=4, microbatches=4, group=0)


def test_forward_only_lets_a_microbatch_leave_as_soon_as_it_can() -> None:
    assert rows(forward_only(ranks=2, microbatches=3, placement=vee(2))) == [
        "0F0 0F1 0F2 3F0 3F1 3F2",
        "1F0 2F0 1F1 2F1 1F2 2F2",
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_forward_only_has_the_bubble_that_it_states(ranks: int) -> None:
    for count in microbatches(ranks):
        for stages in (1, 2, 3):
            schedule = forward_only(ranks=ranks, microbatches=count, stages_per_rank=stages)
            fpipe.verify(schedule, requires="F")
            if stages == 1 or count % ranks == 0:
                assert bubble(schedule, Cost(6, 0, 0)) == 6 * (ranks - 1) / stages
        on_v = forward_only(ranks=ranks, microbatches=count, placement=vee(ranks))
        fpipe.verify(on_v, requires="F")
        assert bubble(on_v, Cost(2, 0, 0)) == 2 * (ranks - 1)


def test_forward_only_refuses_a_placement_on_ranks_that_are_not_there() -> None:
    with pytest.raises(ScheduleError, match=r"placement\[1\]=1 must be a rank from 0 to 0"):
        forward_only(ranks=1, microbatches=1, placement=[0, 1])
    with pytest.raises(ScheduleError, match=r"placement=1 is an int: it must be a sequence"):
        forward_only(ranks=1, microbatches=1, placement=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("cost", [Cost(1, 1, 1), Cost(10, 12, 8), Cost(2, 3, 1)])
def test_zb_auto_is_as_good_as_zb_h1_in_its_memory(ranks: int, cost: Cost) -> None:
    for count in microbatches(ranks):
        timeline = simulate(zb_auto(ranks=ranks, microbatches=count, cost=cost), cost)
        assert timeline.makespan <= simulate(zb_h1(ranks=ranks, microbatches=count), cost).makespan
        assert max(timeline.peak) <= ranks
        if count >= ranks:
            assert timeline.gap == 0


def test_zb_auto_uses_the_memory_it_gets() -> None:
    cost = Cost(f=1, i=1, w=1, comm=1)
    makespans = []
    for memory in (1, 2, 4, 8):
        schedule = zb_auto(ranks=4, microbatches=12, memory=memory, cost=cost)
        fpipe.verify(schedule)
        timeline = simulate(schedule, cost)
        assert max(timeline.peak) <= memory
        makespans.append(timeline.makespan)
    assert makespans == sorted(makespans, reverse=True)
    assert makespans[-1] == 43


def test_zb_auto_says_how_a_cost_is_made() -> None:
    with pytest.raises(ScheduleError, match=r"cost=3 is an int: make one with fpipe.Cost"):
        zb_auto(ranks=2, microbatches=2, cost=3)  # type: ignore[arg-type]


def test_zb_auto_fuses_where_there_is_no_memory_for_what_i_hands_on() -> None:
    cost = Cost(1, 1, 1, freed_by_i=-1)
    schedule = zb_auto(ranks=2, microbatches=2, memory=1, cost=cost)
    assert schedule == Schedule.from_text("0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1")
    for memory in (1.5, 2, 2.5, 4):
        schedule = zb_auto(ranks=3, microbatches=9, memory=memory, cost=cost)
        assert max(simulate(schedule, cost).peak) <= memory
    assert schedule.splits_backward
    with pytest.raises(ScheduleError, match=r"memory=0.5 of rank 0 admits no schedule"):
        zb_auto(ranks=2, microbatches=2, memory=0.5)
