"""The division into stages against all divisions that there are."""

from __future__ import annotations

from functools import partial
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fpipe
from fpipe.modules.division import Division, divide
from fpipe.schedule.placements import linear, looped, vee

SIZES = st.integers(1, 6).map(float)


def every_division(
    loads: list[float], widths: list[float], placement: tuple[int, ...], needs: list[float]
) -> list[tuple[Division, float]]:
    """All of them, each with the memory of its fullest rank."""
    found = []
    for inner in combinations(range(1, len(loads)), len(placement) - 1):
        ends = (*inner, len(loads))
        starts = (0, *inner)
        ranks = range(max(placement) + 1)
        load, memory = [], [0.0 for _ in ranks]
        for start, end, rank in zip(starts, ends, placement, strict=True):
            load.append(sum(loads[start:end]))
            memory[rank] += sum(needs[start:end])
        crossing = sum(
            widths[end - 1]
            for end, here, there in zip(inner, placement, placement[1:], strict=False)
            if here != there
        )
        found.append((Division(ends, max(load), crossing), max(memory)))
    return found


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=6, max_size=9),
    placement=st.sampled_from(
        [linear(1), linear(3), linear(4), vee(2), vee(3), looped(2, 2), looped(2, 3)]
    ),
    slack=st.sampled_from([0.0, 0.3]),
    share=st.sampled_from([0.6, 1.0]),
)
def test_division_is_the_best_of_all(
    parts: list[tuple[float, float, float]],
    placement: tuple[int, ...],
    slack: float,
    share: float,
) -> None:
    loads, widths, needs = (list(column) for column in zip(*parts, strict=True))
    limit = share * sum(needs)
    options = [d for d, used in every_division(loads, widths, placement, needs) if used <= limit]
    best_of = partial(
        divide,
        loads,
        widths,
        placement,
        memory=lambda stage, first, end: sum(needs[first:end]),
        limit=limit,
        slack=slack,
    )
    if not options:
        with pytest.raises(fpipe.StageError, match=r"no division into .* within memory="):
            best_of()
        return
    fastest = min(option.slowest for option in options)
    allowed = [o for o in options if o.slowest <= fastest * (1 + slack) * (1 + 1e-12)]
    best = min(allowed, key=lambda option: (option.crossing, option.slowest))
    got = best_of()
    assert got in options
    assert (got.crossing, got.slowest) == (best.crossing, best.slowest)


def test_thirty_layers_on_four_ranks_with_a_big_head() -> None:
    # The head weighs four layers: its rank gets fewer of them.
    got = divide([1.0] * 30 + [4.0], [1.0] * 31, linear(4))
    assert got.slowest == 9.0 and got.ends[-1] == 31
    v_shaped = divide([1.0] * 30 + [4.0], [1.0] * 31, vee(4))
    assert v_shaped.slowest == 5.0 and len(v_shaped.ends) == 8


def test_fewer_parts_than_stages_are_refused() -> None:
    with pytest.raises(fpipe.StageError, match=r"has 2 parts .* fewer than the 3 stages"):
        divide([1.0, 1.0], [1.0, 1.0], linear(3))
