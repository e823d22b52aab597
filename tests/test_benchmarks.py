"""The benchmarks run, and their tables say what they mean. Nothing is timed in earnest here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import torch

import fpipe
from benchmarks.harness import WARMUP, Report, Timings, interleave
from benchmarks.models import blocks, init_blocks, mean_square
from benchmarks.split.run import held_after, schedule_of

ROOT: Final = Path(__file__).parents[1]


def run_benchmark(module: str, tmp_path: Path, *options: str) -> dict[str, Any]:
    """Run a benchmark as a user would; returns its report."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", module, "--rounds", "1", "--json", str(report), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text("utf-8"))


def test_interleave_runs_each_case_once_a_round_in_turning_order() -> None:
    ran: list[str] = []
    timings = interleave({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}, rounds=3)
    assert "".join(ran) == "a" * WARMUP + "b" * WARMUP + "ab" + "ba" + "ab"
    assert [len(seconds) for seconds in timings.seconds.values()] == [3, 3]


def test_ratio_is_taken_within_each_round() -> None:
    # The last round ran on a machine ten times slower: both cases suffered alike.
    timings = Timings({"a": [2.0, 2.0, 20.0], "b": [1.0, 1.0, 10.0]})
    assert timings.median("a") == 2.0
    assert timings.ratio("a", "b") == 2.0


def test_table_is_aligned_markdown() -> None:
    report = Report("t", "c", {}, {}, ("case", "ms"), [["first", 1.23456], ["second", None]])
    assert report.table() == [
        "| case   |    ms |",
        "| ------ | ----: |",
        "| first  | 1.235 |",
        "| second |     – |",
    ]


@pytest.mark.parametrize(("pattern", "texts"), [("FB", "0F0 0B0 0F1 0B1"), ("FIW", "0F0 0I0 0W0")])
def test_schedule_of_repeats_the_pattern(pattern: str, texts: str) -> None:
    schedule = schedule_of(pattern, microbatches=texts.count("F"))
    assert " ".join(map(str, schedule.actions[0])) == texts
    fpipe.verify(schedule)


def test_held_after_counts_what_waits_for_a_later_pass() -> None:
    # Two microbatches of one row: the loss of the first and its gradients are results, not held.
    pipe = fpipe.pipeline([lambda w, x: (x * w).sin()], mean_square, schedule_of("FB", 2),
                          compile=False)  # fmt: skip
    (program,) = pipe.programs([torch.ones(4)], torch.ones(2, 4))
    assert held_after(program, "0B0") == 4 * 4  # the sum so far, until the second B replaces it
    assert 4 * 4 <= held_after(program, "0F0") <= 3 * 4 * 4


def test_models_keep_the_shape() -> None:
    params = init_blocks(2, 64, torch.device("cpu"), torch.float32)
    assert blocks(params, torch.ones(3, 5, 64)).shape == (3, 5, 64)


@pytest.mark.inductor
def test_overhead_runs(tmp_path: Path) -> None:
    options = ("--schedule", "1F1B", "--microbatches", "2")
    report = run_benchmark("benchmarks.overhead.run", tmp_path, *options)
    ((name, actions, *figures),) = report["rows"]
    assert (name, actions) == ("1F1B", 4)
    assert all(figure > 0 for figure in figures)


@pytest.mark.inductor
def test_split_runs(tmp_path: Path) -> None:
    options = ("--depth", "1", "--width", "64", "--length", "8", "--rows", "1")
    report = run_benchmark("benchmarks.split.run", tmp_path, *options, "--microbatches", "2")
    assert [row[0] for row in report["rows"]] == ["compiled autograd", "F+B", "F+I+W"]
