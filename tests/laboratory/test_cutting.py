"""The choice of the layers of each stage, together with placement and order."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from fpipe import Cost, ScheduleError, search, simulate
from tests.laboratory.exhaustive import best

LAYERS = Cost(
    f=[1, 1, 2, 1, 3], i=[1, 1, 2, 1, 2], w=[1, 1, 1, 1, 2], activation=[1, 1, 1, 1, 1], comm=0.5
)


def stages(cost: Cost, cut: tuple[int, ...]) -> Cost:
    ends = [sum(cut[:at]) for at in range(len(cut) + 1)]

    def merged(value: Any) -> Any:
        return tuple(sum(value[a:b]) for a, b in pairwise(ends))

    names = ("f", "i", "w", "activation")
    return replace(cost, **{name: merged(getattr(cost, name)) for name in names})


@pytest.mark.parametrize("speed", [None, (2.0, 1.0)])
@pytest.mark.parametrize("memory", [5, 9])
def test_a_search_finds_the_best_cut_and_order_of_all(speed: Any, memory: float) -> None:
    cost = replace(LAYERS, speed=speed)
    values: dict[tuple[int, ...], float] = {}
    for first in range(1, 5):
        cut = (first, 5 - first)
        if max(cut) <= memory:
            values[cut] = best((0, 1), 2, stages(cost, cut), memory)
    result = search(
        ranks=2, microbatches=2, cost=cost, memory=memory, placement="linear", cut=True,
        iterations=60,
    )  # fmt: skip
    assert result.cut is not None
    assert result.value == pytest.approx(min(values.values()))
    assert values[result.cut] == pytest.approx(result.value)
    assert result.bound <= result.value
    assert simulate(result.schedule, stages(cost, result.cut)).makespan == result.value


def test_the_placement_is_a_choice_too() -> None:
    cost = Cost(f=[1] * 8, i=[1] * 8, w=[1] * 8, activation=[1] * 8, speed=[1, 0.5])
    arguments: dict[str, Any] = {"ranks": 2, "microbatches": 4, "cut": True, "iterations": 8}
    chosen = search(cost=cost, **arguments)
    assert chosen.cut is not None and len(chosen.cut) == len(chosen.schedule.placement)
    assert sum(chosen.cut) == 8
    assert chosen.bought is not None
    assert list(chosen.bought) == ["1F1B", "order", "placement", "cut"]
    values = list(chosen.bought.values())
    assert values == sorted(values, reverse=True) and values[-1] == chosen.value < values[0]
    layers = [0, 0]
    for rank, count in zip(chosen.schedule.placement, chosen.cut, strict=True):
        layers[rank] += count
    assert layers[0] > layers[1]  # the slow rank has less
    for placement in ("linear", "looped", "v"):
        one = search(cost=cost, placement=placement, **arguments)
        assert chosen.bound <= one.value and chosen.value <= one.value * 1.05


def test_the_stages_of_a_rank_are_a_choice_too() -> None:
    """Without messages more and smaller stages are better, up to as many as there are layers."""
    cost = Cost(f=[1] * 8, i=[1] * 8, w=[1] * 8, activation=[1] * 8)
    arguments: dict[str, Any] = {"ranks": 2, "microbatches": 4, "cut": True, "iterations": 10}
    free = search(cost=cost, **arguments)
    assert free.schedule.num_stages == 8 and free.cut == (1,) * 8
    # Messages that take long let them be few, and memory decides as well.
    slow = search(cost=replace(cost, comm=9.0), **arguments)
    assert slow.schedule.num_stages == 2 and slow.cut == (4, 4)
    with pytest.raises(ScheduleError, match="3 layers are too few for 4 stages"):
        few = Cost(f=[1] * 3, i=[1] * 3, w=[1] * 3, activation=[1] * 3)
        search(ranks=4, microbatches=2, cost=few, cut=True)


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"f": 1, "i": 1, "w": 1, "activation": 1}, {}, r"cut=True cuts a chain of layers: .*none"),
        ({"w": (1.0, 2.0)}, {}, "cut=True cuts a chain of layers: .* not 2 and 5"),
        ({}, {"remat": True}, "cut=True goes neither with remat=True nor with start="),
        ({}, {"placement": [0, 1, 0, 1, 0, 1]}, "5 layers are too few for 6 stages"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    changes: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        search(ranks=2, microbatches=2, cost=replace(LAYERS, **changes), cut=True, **arguments)
