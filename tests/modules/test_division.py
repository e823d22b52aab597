"""The division into stages against all divisions that there are."""

from __future__ import annotations

from functools import partial
from itertools import combinations, pairwise
from operator import le
from random import Random
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fpipe
from fpipe import Schedule, schedules
from fpipe.modules.division import Division, divide
from fpipe.schedule.placements import linear, looped, vee

SIZES = st.integers(1, 6).map(float)


def every_division(
    loads: list[float],
    widths: list[float],
    placement: tuple[int, ...],
    needs: list[float],
    microbatches: int,
    speed: list[float] | None = None,
) -> list[tuple[Division, float]]:
    """All of them, each with the memory of its fullest rank."""
    divisions = []
    for inner in combinations(range(1, len(loads)), len(placement) - 1):
        ends = (*inner, len(loads))
        starts = (0, *inner)
        ranks = max(placement) + 1
        load, memory, busy = [], [0.0] * ranks, [0.0] * ranks
        for start, end, rank in zip(starts, ends, placement, strict=True):
            load.append(sum(loads[start:end]) / (speed[rank] if speed else 1))
            busy[rank] += load[-1]
            memory[rank] += sum(needs[start:end])
        time = microbatches * max(busy) + (ranks - 1) * max(load)
        crossing = sum(
            widths[end - 1]
            for end, here, there in zip(inner, placement, placement[1:], strict=False)
            if here != there
        )
        divisions.append((Division(ends, max(load), max(busy), time, crossing), max(memory)))
    return divisions


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=6, max_size=9),
    placement=st.sampled_from(
        [linear(1), linear(3), linear(4), vee(2), vee(3), looped(2, 2), looped(2, 3)]
    ),
    slack=st.sampled_from([0.0, 0.3]),
    share=st.sampled_from([0.6, 1.0]),
    microbatches=st.sampled_from([1, 4, 16]),
    speed=st.just([1.0] * 4) | st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=4, max_size=4),
)
def test_division_is_the_best_of_all(
    parts: list[tuple[float, float, float]],
    placement: tuple[int, ...],
    slack: float,
    share: float,
    microbatches: int,
    speed: list[float],
) -> None:
    loads, widths, needs = (list(column) for column in zip(*parts, strict=True))
    limit = share * sum(needs)
    speed = speed[: max(placement) + 1]
    everything = every_division(loads, widths, placement, needs, microbatches, speed)
    options = [division for division, used in everything if used <= limit]
    best_of = partial(
        divide,
        loads,
        widths,
        placement,
        microbatches=microbatches,
        memory=lambda stage, first, end: sum(needs[first:end]),
        limit=limit,
        slack=slack,
        speed=speed,
    )
    if not options:
        with pytest.raises(fpipe.StageError, match=r"no division into .* within memory="):
            best_of()
        return
    fastest = min(option.time for option in options)
    allowed = [o for o in options if o.time <= fastest * (1 + slack) * (1 + 1e-12)]
    best = min(allowed, key=lambda option: (option.crossing, option.time))
    got = best_of()
    assert got in options
    assert (got.crossing, got.time) == (best.crossing, best.time)
    # Among equally good ones, the one with the most even stages.
    as_good = [o for o in allowed if all(map(le, o.figures, got.figures))]
    assert squares(loads, got, placement, speed) == min(
        squares(loads, o, placement, speed) for o in as_good
    )
    if len(set(placement)) == len(placement):
        # One stage a rank: the shortest step is the fastest slowest stage.
        assert fastest == min(o.slowest for o in options) * (microbatches + len(placement) - 1)


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.tuples(SIZES, SIZES), min_size=6, max_size=9),
    placement=st.sampled_from([vee(2), vee(3), looped(2, 2), looped(2, 3)]),
    share=st.sampled_from([0.55, 0.6, 1.0]),
)
def test_search_follows_more_ways_where_memory_is_scarce(
    parts: list[tuple[float, float]], placement: tuple[int, ...], share: float
) -> None:
    """With one label for each end the search may miss the best division, but finds one."""
    loads, needs = (list(column) for column in zip(*parts, strict=True))
    limit = share * sum(needs)
    everything = every_division(loads, loads, placement, needs, 4)
    options = {division.ends: division for division, used in everything if used <= limit}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fpipe.modules.division.WIDTH", 1)
        try:
            got = divide(
                loads,
                [0.0] * len(loads),
                placement,
                microbatches=4,
                memory=lambda stage, first, end: sum(needs[first:end]),
                limit=limit,
            )
        except fpipe.StageError:
            assert not options
        else:
            assert got.time == options[got.ends].time


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.gpipe(ranks=4, microbatches=8),
        schedules.one_f_one_b(ranks=4, microbatches=8),
        schedules.interleaved_1f1b(ranks=4, microbatches=8),
        schedules.interleaved_1f1b(ranks=2, microbatches=8, stages_per_rank=3),
    ],
    ids=lambda schedule: f"{schedule.name} {schedule.num_stages}",
)
def test_time_is_that_of_the_schedule_where_stages_are_even(schedule: Schedule) -> None:
    count = 2 * schedule.num_stages
    got = divide(
        [1.0] * count, [1.0] * count, schedule.placement, microbatches=schedule.num_microbatches
    )
    stage = [2.0] * schedule.num_stages
    assert fpipe.simulate(schedule, fpipe.Cost(f=stage, i=stage, w=stage)).makespan == 3 * got.time


def test_uneven_chains_are_divided_for_short_steps() -> None:
    """The search once took any division with the fastest slowest stage, whatever ranks had to do.

    On paper, over all divisions of a small embedding, eight layers and a head.
    """
    chosen, slowest_alone = [], []
    for schedule in (
        schedules.zbv(ranks=2, microbatches=8),
        schedules.dualpipev(ranks=2, microbatches=8),
        schedules.interleaved_1f1b(ranks=2, microbatches=8),
        schedules.interleaved_zero_bubble(ranks=2, microbatches=8),
    ):
        for head in (1.5, 2.5):
            loads = [0.3, *[1.0] * 8, head]
            everything = every_division(loads, loads, schedule.placement, loads, 8)
            steps = {d.ends: step_of(schedule, loads, d.ends) for d, _ in everything}
            best = min(steps.values())
            got = divide(loads, [1.0] * len(loads), schedule.placement, microbatches=8)
            chosen.append(steps[got.ends] / best)
            fastest = min(division.slowest for division, _ in everything)
            tied = [steps[d.ends] for d, _ in everything if d.slowest == fastest]
            slowest_alone.append(mean(tied) / best)
    assert max(chosen) < 1.05 and mean(chosen) < 1.01 < mean(slowest_alone)


def step_of(schedule: Schedule, loads: list[float], ends: tuple[int, ...]) -> float:
    """The simulated time of a step."""
    stages = [sum(loads[first:end]) for first, end in pairwise((0, *ends))]
    return fpipe.simulate(schedule, fpipe.Cost(f=stages, i=stages, w=stages)).makespan


def squares(
    loads: list[float], division: Division, placement: tuple[int, ...], speed: list[float]
) -> float:
    ends = zip(pairwise((0, *division.ends)), placement, strict=True)
    return sum((sum(loads[first:end]) / speed[rank]) ** 2 for (first, end), rank in ends)


def test_layers_beside_a_head_that_weighs_as_much_as_all_of_them_are_divided_evenly() -> None:
    got = divide([1.0] * 30 + [30.0], [1.0] * 30, linear(4), microbatches=8)
    assert got.ends == (10, 20, 30, 31)
    # The rank of the head has one layer in its other stage.
    twice = divide([1.0] * 28 + [30.0], [1.0] * 28, looped(4, 2), microbatches=8)
    sizes = [end - first for first, end in pairwise((0, *twice.ends))]
    assert (sizes.pop(), sizes.pop(3)) == (1, 1)
    assert min(sizes) >= 3 and max(sizes) <= 6  # as even as so few labels find: 27 on six stages


def test_thirty_layers_on_four_ranks_with_a_big_head() -> None:
    # The head weighs four layers: its rank gets fewer of them.
    got = divide([1.0] * 30 + [4.0], [1.0] * 31, linear(4), microbatches=8)
    assert got.slowest == 9.0 and got.ends[-1] == 31
    v_shaped = divide([1.0] * 30 + [4.0], [1.0] * 31, vee(4), microbatches=8)
    assert v_shaped.slowest == 5.0 and v_shaped.busiest == 9.0 and len(v_shaped.ends) == 8


def test_long_chains_on_many_ranks_are_divided_evenly() -> None:
    """More ways are open than are followed; within memory one is found nevertheless."""
    loads = [1.0] * 65 + [2.5]
    got = divide(loads, [1.0] * 66, vee(8), microbatches=16)
    # 67.5 on eight ranks of two stages: no rank can have less than nine layers, or seven and head.
    assert got.busiest == 9.0 and got.slowest == 5.0
    tight = divide(
        loads,
        [1.0] * 66,
        looped(8, 2),
        microbatches=16,
        memory=lambda stage, first, end: end - first,
        limit=9.0,
    )
    assert max(b - a for a, b in pairwise((0, *tight.ends))) <= 9 and tight.busiest <= 9.5


def test_memory_that_is_too_small_is_refused_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """On ranks of several stages there are more ways than can be followed until none is left."""
    draws = Random(1)
    loads, needs = ([draws.random() for _ in range(48)] for _ in range(2))
    calls: list[tuple[int, int, int]] = []

    def divided(share: float, placement: tuple[int, ...]) -> Division:
        def memory(stage: int, first: int, end: int) -> float:
            calls.append((stage, first, end))
            return sum(needs[first:end])

        calls.clear()
        limit = share * sum(needs) / (max(placement) + 1)
        return divide(loads, loads, placement, microbatches=8, memory=memory, limit=limit)

    for placement in (looped(4, 2), vee(4)):
        with pytest.raises(fpipe.StageError, match="no division into 8 stages keeps every rank w"):
            divided(0.9, placement)
        assert len(calls) < 2_000  # the first stage shows it, whatever it takes
        assert max(division_memory(divided(1.1, placement), needs, placement)) <= (
            1.1 * sum(needs) / 4
        )
    # So even a division may or may not be there: the search ends, and says that it was cut off.
    monkeypatch.setattr("fpipe.modules.division.WIDEST", 64)
    with pytest.raises(fpipe.StageError, match=r"among the 64 most promising ways .* keeps every"):
        divided(1.0001, looped(4, 2))


@settings(max_examples=80, deadline=None)
@given(
    parts=st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=6, max_size=9),
    placement=st.sampled_from([linear(3), linear(4), vee(2), vee(3), looped(2, 2)]),
    held=st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=6, max_size=6),
    share=st.sampled_from([0.7, 0.9, 1.2]),
)
def test_boundaries_need_memory_too(
    parts: list[tuple[float, float, float]],
    placement: tuple[int, ...],
    held: list[float],
    share: float,
) -> None:
    """No stage need be the one that needs least for whatever parts: the search is still exact."""
    loads, widths, needs = (list(column) for column in zip(*parts, strict=True))

    def least(stage: int, first: int, end: int) -> float:
        return held[stage] * sum(needs[first:end])

    def memory(stage: int, first: int, end: int) -> float:
        far = stage > 0 and placement[stage - 1] != placement[stage]
        return least(stage, first, end) + (3 * held[stage] * widths[first - 1] if far else 0.0)

    ranks = max(placement) + 1
    limit = share * sum(held) / 3 * sum(needs) / ranks
    options = []
    for division, _ in every_division(loads, widths, placement, needs, 4):
        used = [0.0] * ranks
        for stage, (first, end) in enumerate(pairwise((0, *division.ends))):
            used[placement[stage]] += memory(stage, first, end)
        if max(used) <= limit:
            options.append(division)
    best_of = partial(
        divide, loads, widths, placement, microbatches=4, memory=memory, least=least, limit=limit
    )
    if not options:
        with pytest.raises(fpipe.StageError, match=r"no division into .* within memory="):
            best_of()
        return
    got = best_of()
    assert got in options and got.time == min(option.time for option in options)


def test_a_bound_of_memory_knows_no_boundaries() -> None:
    """A wide boundary within a rank, which costs nothing there, hid the stage that holds least."""
    needs, widths, held = [1.0, 1.0, 1.0, 10.0], [0.0, 9.0, 0.0, 0.0], [1, 1, 2, 1]
    placement = vee(2)

    def least(stage: int, first: int, end: int) -> float:
        return held[stage] * sum(needs[first:end])

    def memory(stage: int, first: int, end: int) -> float:
        far = stage > 0 and placement[stage - 1] != placement[stage]
        return least(stage, first, end) + (3 * widths[first - 1] if far else 0.0)

    divided = partial(divide, needs, widths, placement, microbatches=4, memory=memory, limit=11.0)
    assert divided(least=least).ends == (1, 2, 3, 4)
    with pytest.raises(fpipe.StageError, match="no division into 4 stages"):
        divided()  # what is needed of one stage and of all is no bound here


def division_memory(
    division: Division, needs: list[float], placement: tuple[int, ...]
) -> list[float]:
    """The memory that each rank needs."""
    used = [0.0] * (max(placement) + 1)
    for rank, (first, end) in zip(placement, pairwise((0, *division.ends)), strict=True):
        used[rank] += sum(needs[first:end])
    return used


def test_fewer_parts_than_stages_are_refused() -> None:
    with pytest.raises(fpipe.StageError, match=r"has 2 parts .* fewer than the 3 stages"):
        divide([1.0, 1.0], [1.0, 1.0], linear(3), microbatches=1)
