"""The bubble and the peak that each family's docstring states, in the range that it states."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest

from fpipe import schedules
from tests.schedule.brute import Run, run

RANKS = range(1, 6)
COSTS = [(1, 1, 1), (2, 3, 1), (5, 7, 3), (2, 2, 1)]  # (f, i, w), with w no longer than f or i


def sizes(upto: int = 12) -> Iterator[tuple[int, int]]:
    return ((p, m) for p in RANKS for m in range(1, upto))


def interleaved_sizes() -> Iterator[tuple[int, int, int, int]]:
    """p, m, v and the size of a round, for every m that divides into rounds."""
    for p, m in sizes():
        rounds = max(1, m // p)
        if m % rounds == 0:
            yield from ((p, m, v, m // rounds) for v in (1, 2, 3))


def played(name: str, cost: tuple[int, int, int] = (1, 1, 1), **arguments: Any) -> Run:
    done = run(schedules.get(name, **arguments), *cost)
    assert done is not None, f"{name} with {arguments} is stuck"
    return done


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "eager_1f1b"])
def test_unsplit_schedules(name: str, cost: tuple[int, int, int]) -> None:
    f, i, w = cost
    for p, m in sizes():
        done = played(name, cost, ranks=p, microbatches=m)
        peak = {"gpipe": m, "one_f_one_b": min(p, m), "eager_1f1b": min(2 * p - 1, m)}[name]
        assert done.bubble == (p - 1) * (f + i + w), (p, m)
        assert done.peak == peak, (p, m)


@pytest.mark.parametrize("cost", COSTS)
def test_interleaved_1f1b(cost: tuple[int, int, int]) -> None:
    f, i, w = cost
    for p, m, v, g in interleaved_sizes():
        done = played("interleaved_1f1b", cost, ranks=p, microbatches=m, stages_per_rank=v)
        few = (v - 1) * max(0, p - m)
        assert done.bubble == Fraction((p - 1 + few) * (f + i + w), v), (p, m, v)
        assert done.peak == min(m, Fraction((v - 1) * g + 2 * (p - 1) + 1, v)), (p, m, v)


@pytest.mark.parametrize("cost", COSTS)
def test_looped_bfs(cost: tuple[int, int, int]) -> None:
    f, i, w = cost
    for p, m in sizes(9):
        for v in (1, 2, 3):
            done = played("looped_bfs", cost, ranks=p, microbatches=m, stages_per_rank=v)
            few = (v - 1) * max(0, p - m)
            assert done.bubble == Fraction((p - 1 + few) * (f + i + w), v), (p, m, v)
            assert done.peak == m, (p, m, v)


@pytest.mark.parametrize("cost", COSTS)
def test_zb_h1(cost: tuple[int, int, int]) -> None:
    f, i, w = cost
    for p, m in sizes():
        done = played("zb_h1", cost, ranks=p, microbatches=m)
        if m >= p:
            assert done.bubble == (p - 1) * (f + i - w), (p, m)
        assert done.peak == min(p, m), (p, m)


def test_zb_h1_with_a_long_weight_gradient_keeps_a_bubble() -> None:
    # The formula would give 0, which is why its docstring asks for a W no longer than F or I.
    assert played("zb_h1", (1, 1, 2), ranks=4, microbatches=8).bubble == 3


@pytest.mark.parametrize("cost", COSTS)
def test_zb_h2(cost: tuple[int, int, int]) -> None:
    f, i, w = cost
    for p, m in sizes():
        done = played("zb_h2", cost, ranks=p, microbatches=m)
        if m >= 2 * p - 1:
            assert done.span - done.work == max(0, (p - 1) * (f + i - 2 * w)), (p, m)
        assert done.peak == min(2 * p - 1, m), (p, m)


@pytest.mark.parametrize("cost", COSTS)
def test_interleaved_zero_bubble(cost: tuple[int, int, int]) -> None:
    f, i, w = cost
    for p, m, v, g in interleaved_sizes():
        done = played("interleaved_zero_bubble", cost, ranks=p, microbatches=m, stages_per_rank=v)
        if m >= p:
            assert done.bubble == Fraction((p - 1) * (f + i - w), v), (p, m, v)
        assert done.peak == min(m, Fraction((v - 1) * g + p, v)), (p, m, v)
        if m % p == 0:
            assert done.peak == p, (p, m, v)


def test_zbv() -> None:
    for p, m in sizes():
        done = played("zbv", (2, 2, 2), ranks=p, microbatches=m)
        if m >= 2 * p - 1:
            assert done.span == done.work, (p, m)
            assert done.bubble == p - 1, (p, m)  # (p − 1)f / 2 with f = 2
        assert done.peak == min(p, m), (p, m)


def test_dualpipev() -> None:
    for p, m in sizes():
        done = played("dualpipev", ranks=p, microbatches=m)
        assert done.peak == min(m, p + Fraction(1, 2)), (p, m)


def test_eager_1f1b_hides_the_latency_that_1f1b_pays() -> None:
    size: Any = {"ranks": 4, "microbatches": 16}
    plain, eager = (schedules.get(name, **size) for name in ("one_f_one_b", "eager_1f1b"))
    late_plain, late_eager = run(plain, 2, 2, 2, hop=1), run(eager, 2, 2, 2, hop=1)
    assert late_plain is not None and late_eager is not None
    assert late_eager.makespan < late_plain.makespan
