"""Costs: what a number and what a sequence mean, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fpipe import Cost, ScheduleError
from fpipe.schedule.exchange.json_file import KEYS


def test_a_number_is_for_a_rank_and_a_stage_takes_its_part() -> None:
    costs = Cost(f=6, i=3, w=9, activation=12, freed_by_i=3).on([0, 1, 0, 1, 0, 1])
    assert costs.f == (2,) * 6
    assert costs.b == (4,) * 6
    assert costs.activation == (4,) * 6
    assert costs.freed_by_i == (1,) * 6


def test_a_sequence_is_taken_as_it_is() -> None:
    costs = Cost(f=[1, 2, 3, 4], i=2, w=2, b=[3, 3, 3, 5]).on([0, 1, 1, 0])
    assert costs.f == (1, 2, 3, 4)
    assert costs.i == (1,) * 4
    assert costs.b == (3, 3, 3, 5)


def test_stages_in_a_row_are_made_one() -> None:
    cost = Cost(f=[1, 2, 3, 4], i=2, w=[1, 1, 2, 2], b=[3, 3, 3, 5], comm=[[0, 1], [2, 0]])
    half = cost.merged(2)
    assert (half.f, half.i, half.w, half.b) == ((3, 7), 2, (2, 4), (6, 8))
    assert half.comm == cost.comm
    assert cost.merged(1) == cost
    with pytest.raises(ScheduleError, match=r"stages=3 do not divide the 4 of cost\.f: choose"):
        cost.merged(3)
    with pytest.raises(ScheduleError, match=r"cost\.merged\(2\) makes stages in a row one"):
        cost.on([0, 1])
    with pytest.raises(ScheduleError, match=r"or one number for all$"):
        cost.on([0, 1, 2])


def test_latency_of_each_boundary() -> None:
    costs = Cost(1, 1, 1, comm=[[0, 1], [2, 0]]).on([0, 1, 1, 0])
    assert costs.down == (1, 0, 2)
    assert costs.up == (2, 0, 1)


def test_a_cost_is_a_value() -> None:
    assert Cost([1, 2], 1, 1) == Cost((1, 2), 1, 1)
    assert len({Cost(1, 1, 1, comm=[[0]]), Cost(1, 1, 1, comm=((0,),))}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"f": -1}, r"cost f=-1 must be a finite number, at least 0"),
        ({"i": [1, math.inf]}, r"cost i\[1\]=inf must be a finite number"),
        ({"w": "1"}, r"cost w='1' must be"),
        ({"freed_by_i": math.nan}, r"cost freed_by_i=nan must be a finite number"),
        ({"comm": [[0, 1]]}, r"comm=\[\[0, 1\]\] must be a number, or a square table"),
        ({"comm": [0, 1]}, r"comm=\[0, 1\] must be a number, or a square table"),
        ({"comm": [[0, 1], [-1, 0]]}, r"cost comm\[1\]\[0\]=-1 must be"),
        ({"f": 10**400}, "cost f=inf must be a finite number"),
        ({"f": np.array("1")}, "cost f=array.* must be a finite number"),
        # A makespan of inf, or of less than the least float, cannot be drawn.
        ({"f": Fraction(1, 10**400)}, "cost f=0 must be 0 or from 1e-100"),
        ({"f": 1e308}, r"cost f=1e\+308 must be 0 or from 1e-100 to 1e\+100: choose another unit"),
        ({"w": [1, 5e-324]}, r"cost w\[1\]=4.94066e-324 must be 0 or from 1e-100"),
        # The keys of a dict were taken for times.
        ({"f": {0: 10, 1: 12}}, r"cost f=\{0: 10, 1: 12\} is a dict, which has no order: give"),
        ({"i": {3, 4}}, "is a set, which has no order"),
        ({"sizes": []}, r"cost sizes=\(\) must have a number for each microbatch, or be None"),
        ({"sizes": 2}, "cost sizes=2 must be a sequence, a number per microbatch"),
        ({"sizes": [1, -1]}, r"cost sizes\[1\]=-1 must be a finite number, at least 0"),
        ({"sizes": [1, 0]}, r"cost sizes\[1\]=0: a microbatch of nothing takes no time"),
        ({"sizes": {0: 1}}, "a dict, which has no order: give a sequence with one value per"),
    ],
)
def test_a_bad_number_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Cost(**{"f": 1, "i": 1, "w": 1, **arguments})


def test_a_cost_that_does_not_fit_the_placement_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"cost.f has 2 values for a placement of 3 stages"):
        Cost([1, 1], 1, 1).on([0, 1, 2])
    with pytest.raises(ScheduleError, match=r"cost.comm is a table of 1 ranks .* uses rank 1"):
        Cost(1, 1, 1, comm=[[0]]).on([0, 1])
    with pytest.raises(ScheduleError, match=r"freed_by_i is 2 for stage 0 .* cannot free more"):
        Cost(1, 1, 1, freed_by_i=2).on([0, 1])


def test_any_real_number_will_do_and_is_kept_as_pythons_own() -> None:
    given: list[Any] = [np.float32(1.5), np.float64(1.5), Fraction(3, 2), np.array(1.5).item()]
    for number in given:
        cost = Cost(number, 1, 1)
        assert cost.f == 1.5
        assert type(cost.f) is float
    three: Any = np.int64(3)
    cost = Cost(np.array([1, 2]), three, 1, comm=np.array([[0, 1], [2, 0]]))
    assert cost == Cost([1, 2], 3, 1, comm=[[0, 1], [2, 0]])
    assert type(cost.i) is int


@pytest.mark.parametrize("placement", [[], {}, "2", [-1], 2])
def test_what_is_no_placement_is_refused(placement: Any) -> None:
    with pytest.raises(ScheduleError, match=r"^placement="):
        Cost(f=1, i=1, w=1).on(placement)


@pytest.mark.parametrize("ranks", ["x", 1.5, 0, True])
def test_ranks_are_a_number_of_them(ranks: Any) -> None:
    with pytest.raises(ScheduleError, match=r"^ranks=.* must be an integer, 1 or more"):
        Cost(1, 1, 1).on([0, 1], ranks)


def test_ranks_must_hold_the_placement() -> None:
    assert Cost(3, 1, 1).on([0, 1], 3).f == (4.5, 4.5)
    with pytest.raises(ScheduleError, match=r"ranks=1 are too few for a placement .* rank 1: leav"):
        Cost(1, 1, 1).on([0, 1], 1)


@pytest.mark.parametrize("rank", ["a", -1, None, 0.0])
def test_a_hop_is_from_a_rank_to_a_rank(rank: Any) -> None:
    cost = Cost(1, 1, 1, comm=[[0, 1], [2, 0]])
    counted: Any = np.int64(1)
    assert cost.hop(1, 0) == cost.hop(counted, 0) == 2
    with pytest.raises(ScheduleError, match=r"^target=.* must be the number of a rank, 0 or more"):
        cost.hop(0, rank)
    with pytest.raises(ScheduleError, match=r"^source=.* must be the number of a rank, 0 or more"):
        cost.hop(rank, 0)


# ── files ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "cost",
    [
        Cost(1, 1, 1),
        Cost([0.1, 1 / 3], 2, [3, 4], comm=[[0, 1], [2, 0]], b=5, activation=1e-9, sizes=[1, 0.3]),
        Cost(1, 1, 1, activation=2, freed_by_i=[-1, 0.5]),
    ],
)
def test_a_file_has_all_of_a_cost(cost: Cost, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    text = cost.to_json(path)
    assert path.read_text() == text == cost.to_json()
    assert Cost.from_json(path) == cost
    assert set(json.loads(text)) <= set(KEYS)
    assert tuple(field.name for field in fields(Cost)) == KEYS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON: "),
        ("[1, 1, 1]", "not a cost: it must be an object with f, i and w, and of comm, b, activ"),
        ('{"f": 1, "i": 1}', "not a cost: it must be an object with f, i and w"),
        ('{"f": 1, "i": 1, "w": 1, "x": 1, "a": 1}', "not a cost, for it has a, x: it must be"),
        ('{"f": 1, "i": 1, "w": 1, "f": 2}', "has the key 'f' twice"),
        ('{"f": "x", "i": 1, "w": 1}', "cost f='x' must be a finite number"),
    ],
)
def test_what_a_file_lacks_is_told(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=message):
        Cost.from_json(path)
