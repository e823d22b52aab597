"""What every family promises, and what it refuses."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import fpipe
from fpipe import ScheduleError, schedules
from fpipe.schedule.families.rows import alternate, numbered
from tests.schedule.brute import run

FAMILIES = list(schedules.FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_size_verifies_and_runs(name: str) -> None:
    takes_stages = "stages_per_rank" in inspect.signature(schedules.FAMILIES[name]).parameters
    made = 0
    for ranks in range(1, 6):
        for microbatches in range(1, 12):
            for stages in (1, 2, 3) if takes_stages else (None,):
                if name.startswith("interleaved") and microbatches % max(1, microbatches // ranks):
                    continue
                schedule = schedules.get(
                    name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages
                )
                assert schedule.name == name
                assert schedule.num_ranks == ranks
                assert schedule.num_microbatches == microbatches
                fpipe.verify(schedule)
                assert run(schedule) is not None
                made += 1
    assert made >= 45


def test_long_arguments_are_shown_in_short() -> None:
    with pytest.raises(ScheduleError, match=r"^name='x{59} is not a schedule family\."):
        schedules.get("x" * 10_000, ranks=2, microbatches=2)
    many: Any = [0] * 10_000
    with pytest.raises(ScheduleError, match=r"^ranks=\[.{59} must be an integer, 1 or more$"):
        schedules.gpipe(ranks=many, microbatches=2)


@pytest.mark.parametrize("name", ["forward_only", "Forward-Only", "forwardonly"])
def test_a_schedule_for_evaluation_is_made_by_its_own_function(name: str) -> None:
    with pytest.raises(ScheduleError, match=r"no gradients: call fpipe\.schedules\.forward_only"):
        schedules.get(name, ranks=2, microbatches=2)


def test_families_are_public_functions() -> None:
    for name in FAMILIES:
        assert getattr(schedules, name) is schedules.FAMILIES[name]
        assert name in schedules.__all__


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("value", [0, -1, 2.0, True, None])
def test_counts_are_checked(name: str, value: int) -> None:
    family = schedules.FAMILIES[name]
    counts = ("ranks", "microbatches", "stages_per_rank")
    for argument in inspect.signature(family).parameters.keys() & counts:
        arguments = {"ranks": 2, "microbatches": 4} | {argument: value}
        rule = re.escape(f"{argument}={value!r} must be an integer, 1 or more")
        with pytest.raises(ScheduleError, match=rule):
            family(**arguments)


@pytest.mark.parametrize("name", FAMILIES)
def test_counts_of_numpy_make_the_same_schedule(name: str) -> None:
    family = schedules.FAMILIES[name]
    counts = {"ranks": 2, "microbatches": 4, "stages_per_rank": 2, "group": 1}
    plain = {key: counts[key] for key in inspect.signature(family).parameters.keys() & counts}
    given: dict[str, Any] = {key: np.int64(count) for key, count in plain.items()}
    one, other = family(**plain), family(**given)
    # An action of numpy's numbers equals one of Python's, and its repr tells them apart.
    assert repr((one.placement, one.actions)) == repr((other.placement, other.actions))
    assert (one, hash(one), one.to_json()) == (other, hash(other), other.to_json())


def test_one_stage_per_rank_is_the_plain_family() -> None:
    size = {"ranks": 4, "microbatches": 8}
    plain, split = schedules.eager_1f1b(**size), schedules.zb_h1(**size)
    assert schedules.interleaved_1f1b(**size, stages_per_rank=1) == plain
    assert schedules.interleaved_zero_bubble(**size, stages_per_rank=1) == split
    assert schedules.looped_bfs(**size, stages_per_rank=1).placement == plain.placement


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zero_bubble"])
@pytest.mark.parametrize(("ranks", "microbatches", "nearest"), [(4, 9, (8, 10)), (2, 7, (6, 8))])
def test_rounds_of_one_size(
    name: str, ranks: int, microbatches: int, nearest: tuple[int, int]
) -> None:
    rule = f"microbatches={microbatches} must divide .* take {nearest[0]} or {nearest[1]}"
    with pytest.raises(ScheduleError, match=rule):
        schedules.get(name, ranks=ranks, microbatches=microbatches)
    for count in nearest:
        schedules.get(name, ranks=ranks, microbatches=count)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("GPipe", "gpipe"),
        ("1F1B", "one_f_one_b"),
        ("1f1b", "one_f_one_b"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("LoopedBFS", "looped_bfs"),
        ("INTERLEAVEDZEROBUBBLE", "interleaved_zero_bubble"),
        ("ZBVZeroBubble", "zbv"),
        ("DualPipeV", "dualpipev"),
        ("ZB-H1", "zb_h1"),
        ("Schedule1F1B", "one_f_one_b"),
        ("ScheduleInterleavedZeroBubble", "interleaved_zero_bubble"),
        ("zb_h2", "zb_h2"),
    ],
)
def test_get_takes_torch_names_and_our_own(name: str, family: str) -> None:
    schedule = schedules.get(name, ranks=2, microbatches=4)
    assert schedule == schedules.FAMILIES[family](ranks=2, microbatches=4)


def test_get_passes_stages_per_rank() -> None:
    assert schedules.get("LoopedBFS", ranks=2, microbatches=2, stages_per_rank=3).num_stages == 6
    assert schedules.get("zbv", ranks=2, microbatches=4, stages_per_rank=2).num_stages == 4


@pytest.mark.parametrize(("name", "fixed"), [("1F1B", 1), ("zbv", 2)])
def test_get_refuses_stages_that_the_family_cannot_have(name: str, fixed: int) -> None:
    with pytest.raises(ScheduleError, match="stages_per_rank=True must be an integer"):
        schedules.get(name, ranks=2, microbatches=4, stages_per_rank=True)
    rule = f"stages_per_rank=3 does not fit name='{name}': .* has {fixed} per rank"
    with pytest.raises(ScheduleError, match=rule):
        schedules.get(name, ranks=2, microbatches=4, stages_per_rank=3)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("GPype", r"Did you mean 'gpipe'\?"),
        ("zbh3", r"Did you mean 'zb_h\d'\?"),
        ("ZeroBubble", r"Did you mean 'zbv' or 'interleaved_zero_bubble'\?"),
        ("xyz", r"not a schedule family\. The families are gpipe, one_f_one_b"),
    ],
)
def test_get_helps_with_unknown_names(name: str, hint: str) -> None:
    with pytest.raises(ScheduleError, match=hint):
        schedules.get(name, ranks=2, microbatches=4)


def test_row_words() -> None:
    backwards = [[(0, fpipe.Op.B)]] * 2
    row = alternate([0, 0], backwards, warmup=5)
    assert " ".join(map(str, numbered(row, 1))) == "0F0 0B0"


@pytest.mark.processes
def test_the_schedule_side_never_loads_torch() -> None:
    code = (
        "import sys, fpipe\n"
        "schedule = fpipe.schedules.zbv(ranks=4, microbatches=8)\n"
        "fpipe.verify(schedule)\n"
        "print(schedule)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
