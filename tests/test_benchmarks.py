"""The benchmarks run, and their tables say what they mean. Nothing is timed in earnest here."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any, Final

import pytest
import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import fpipe
from benchmarks import contest, memory
from benchmarks.compile import run as compiling
from benchmarks.efficiency import run as efficiency
from benchmarks.flops import flops_of_token, peak_of
from benchmarks.harness import WARMUP, Report, Timings, add_arguments, interleave
from benchmarks.models import blocks, init_blocks, mean_square, trainable
from benchmarks.overhead.alone import lone_process_group
from benchmarks.overhead.problem import make_problem
from benchmarks.ranks import greatest, interleave_ranks, on_ranks
from benchmarks.split.run import held_after, schedule_of
from tests import warm

ROOT: Final = Path(__file__).parents[1]

pytestmark = pytest.mark.processes

# The benchmarks stand beside what torch 2.13 has: before, its pipelines over two ranks lost their
# connections, and compiled autograd did not tell what it had saved.
with_peer = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="the other side of the benchmark is that of torch 2.13"
)


def run_benchmark(module: str, tmp_path: Path, *options: str) -> dict[str, Any]:
    """Run a benchmark as a user would; returns its report."""
    report = tmp_path / "report.json"
    arguments = ("--rounds", "1", "--json", str(report), *options)
    done = warm.run(module, *arguments, folder=ROOT, scratch=tmp_path, timeout=280)
    assert done.code == 0, done.output
    return json.loads(report.read_text("utf-8"))


@pytest.fixture
def run_on_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a benchmark of several ranks; returns its report.

    It runs here: its ranks are processes anyway, and forks of one that tests have started already.
    """

    def run(module: str, *options: str) -> dict[str, Any]:
        report = tmp_path / "report.json"
        words = [module, "--rounds", "1", "--json", str(report), *options]
        monkeypatch.setattr(sys, "argv", words)
        importlib.import_module(module).main()
        return json.loads(report.read_text("utf-8"))

    return run


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


def test_rounds_are_counted_from_one(capsys: pytest.CaptureFixture[str]) -> None:
    # A median of nothing failed at the end of all work.
    parser = argparse.ArgumentParser()
    add_arguments(parser, rounds=3)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--rounds", "0"])
    assert "--rounds: '0' must be a whole number, 1 or more" in capsys.readouterr().err


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


@with_peer
@pytest.mark.inductor
def test_overhead_runs_on_ranks(run_on_ranks: Callable[..., dict[str, Any]]) -> None:
    options = ("--ranks", "2", "--schedule", "ZBVZeroBubble", "--microbatches", "2")
    report = run_on_ranks("benchmarks.overhead.run", *options)
    ((name, actions, *figures),) = report["rows"]
    assert (name, actions) == ("ZBVZeroBubble", 12)
    assert all(figure > 0 for figure in figures)


def test_compile_takes_the_same_step_in_each_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: None)
    step: Any = compiling.stepper(2, False)()
    plain: Any = compiling.stepper(2, None)()
    torch.testing.assert_close(step.loss, plain)


def test_compile_measures_the_first_step_of_a_new_process() -> None:
    seconds, processor, compilers = compiling.first_step("uncompiled", 2, {"FPIPE_PROGRESS": "0"})
    assert seconds > 0 and processor > 0 and compilers >= 0


def test_efficiency_runs(run_on_ranks: Callable[..., dict[str, Any]]) -> None:
    options = ("--ranks", "2", "--microbatches", "4", "--milliseconds", "2")
    report = run_on_ranks(
        "benchmarks.efficiency.run", *options, "--uncompiled", "--schedule", "1F1B"
    )
    ((name, ideal, *shares, _, _),) = report["rows"]
    assert (name, ideal) == ("1F1B", pytest.approx(30))
    assert all(0 < share < 1 for share in shares)


def test_naps_put_one_sleep_into_each_piece() -> None:
    schedule = contest.schedule_of("InterleavedZeroBubble", ranks=2, microbatches=2)
    problem = efficiency.make_problem(schedule, seconds=0.0)
    sleeps: set[tuple[str, ...]] = set()

    def count(module: fx.GraphModule, examples: Any) -> Any:
        targets = [str(node.target) for node in module.graph.nodes]
        sleeps.add(tuple(t.split(".")[1] for t in targets if t.startswith("fpipe_naps")))
        return lambda inputs: ()  # nothing is run

    stages, loss = contest.stages_and_loss(problem)
    pipe = fpipe.pipeline(stages, loss, schedule, compile=count)
    pipe.programs(problem.params, (problem.inputs, problem.targets))
    # Each F and each I take a nap, and each W takes a late one; what is made of parameters, none.
    assert sleeps == {("nap",), ("late_nap",), ()}


def test_versus_torch_runs(run_on_ranks: Callable[..., dict[str, Any]]) -> None:
    size = {"layers": 2, "width": 64, "length": 8, "vocabulary": 16, "rows": 4, "microbatches": 2}
    options = [part for name, value in size.items() for part in (f"--{name}", str(value))]
    options += ["--schedule", "1F1B", "--unpipelined", "eager, whole", "--uncompiled"]
    report = run_on_ranks("benchmarks.versus_torch.run", *options)
    assert report["settings"]["speed-up over"] == "unpipelined, eager, whole, 1 thread"
    ((name, *figures),) = report["rows"]
    assert name == "1F1B"
    assert all(figure > 0 for figure in figures)


def test_torch_refuses_to_split_the_backward_of_compiled_stages() -> None:
    schedule = contest.schedule_of("ZBVZeroBubble", ranks=1, microbatches=2)
    problem = make_problem(schedule.num_stages, 2)
    with lone_process_group(), pytest.raises(RuntimeError, match=r"torch\.compile"):
        contest.torch_pipeline(problem, "ZBVZeroBubble", schedule, compile=True)


def test_peak_counts_what_is_held_at_one_time() -> None:
    def run() -> Tensor:
        x = torch.empty(1024)
        y = x + 1
        del x
        return y * 2

    assert memory.peak(run) == pytest.approx(2 * 4096, rel=0.02)  # beside a scalar or two


def test_held_counts_each_storage_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = torch.empty(1024)
    found = [kept, kept[:10], torch.nn.Parameter(kept), "no tensor"]
    # Other tests' tensors come and go in this process: only these are to be seen.
    monkeypatch.setattr(memory.gc, "get_objects", lambda: found)
    assert memory.held() == 4096


def fail_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise RuntimeError("rank 1 has failed")
    time.sleep(60)


def test_a_rank_that_fails_ends_the_benchmark() -> None:
    with pytest.raises(Exception, match="rank 1 has failed"):
        on_ranks(2, fail_on_rank_1)


def test_ranks_leave_no_semaphore(tmp_path: Path) -> None:
    # The process that keeps track of them complained of each at the end of a benchmark.
    program = """
        import multiprocessing

        from benchmarks.ranks import on_ranks

        def take_a_lock(rank):
            # As torch does when it traces with tqdm installed.
            globals()["lock"] = multiprocessing.RLock()

        if __name__ == "__main__":
            on_ranks(2, take_a_lock)
    """
    path = tmp_path / "locks.py"
    path.write_text(dedent(program), "utf-8")
    done = subprocess.run(
        [sys.executable, str(path)],  # -W error would silence that process
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


def name_and_time(rank: int) -> Any:
    slow = {"a": lambda: time.sleep(0.02 * rank), "b": lambda: None}
    timings = interleave_ranks(slow, rounds=2)
    return timings.seconds, greatest([float(rank), -float(rank)])


def test_a_case_takes_until_the_last_rank_has_ended() -> None:
    seconds, values = on_ranks(2, name_and_time)
    assert min(seconds["a"]) > 0.02 > min(seconds["b"]) > 0
    assert values == [1.0, 0.0]


@with_peer
def test_split_runs(tmp_path: Path) -> None:
    options = ("--depth", "1", "--width", "64", "--length", "8", "--rows", "1")
    report = run_benchmark(
        "benchmarks.split.run", tmp_path, *options, "--microbatches", "2", "--uncompiled"
    )
    assert [row[0] for row in report["rows"]] == ["compiled autograd", "F+B", "F+I+W"]
    assert all(0 < row[5] < 100 for row in report["rows"])  # MFU


@with_peer
def test_gpt_runs(tmp_path: Path) -> None:
    size = {"layers": 1, "width": 64, "length": 8, "vocabulary": 32, "rows": 1, "microbatches": 2}
    options = [part for name, value in size.items() for part in (f"--{name}", str(value))]
    report = run_benchmark("benchmarks.gpt.run", tmp_path, *options, "--uncompiled")
    assert [row[0] for row in report["rows"]] == ["torch, compiled", "fpipe"]
    assert all(0 < row[5] < 100 for row in report["rows"])
    assert report["settings"]["MFU"] == "tokens/s x (6 N + 12 layers width length) / peak"


def test_flops_of_a_step_are_those_that_torch_counts() -> None:
    width, length, layers = 64, 8, 2
    params = init_blocks(layers, width, torch.device("cpu"), torch.float32)
    x = torch.ones(3, length, width)
    weights = trainable(params)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        # That of the batch too: all but the first block have such a gradient.
        mean_square(blocks(weights, x.requires_grad_()), x).backward()
    matrices = sum(leaf.numel() for block in params for leaf in block.values() if leaf.ndim == 2)
    expected = 3 * length * flops_of_token(matrices, layers, width, length)
    assert counter.get_total_flops() == expected


def test_the_peak_is_measured_where_no_maker_tells() -> None:
    peak, source = peak_of(torch.device("cpu"), torch.float32, side=64)
    assert peak > 0 and source == "measured, products of 64 x 64 matrices"


@pytest.mark.parametrize(
    ("kind", "names"), [("members", ["2"]), ("microbatches", ["1", "2"]), ("ranks", ["2"])]
)
def test_ensemble_runs(
    tmp_path: Path, run_on_ranks: Callable[..., dict[str, Any]], kind: str, names: list[str]
) -> None:
    shape = ("--length", "4", "--rows", "2", "--microbatches", "2", "--members", "2")
    options = ("--kind", kind, *shape, "--uncompiled")
    if kind == "ranks":
        report = run_on_ranks("benchmarks.ensemble.run", *options)
    else:
        report = run_benchmark("benchmarks.ensemble.run", tmp_path, *options)
    assert [name for name, *_ in report["rows"]] == names
    assert all(figure > 0 for _, *figures in report["rows"] for figure in figures)


@with_peer
def test_remat_runs(tmp_path: Path) -> None:
    options = ("--depth", "2", "--width", "64", "--length", "8", "--rows", "1")
    report = run_benchmark(
        "benchmarks.remat.run", tmp_path, *options, "--microbatches", "2", "--uncompiled"
    )
    held = {row[0]: row[3] for row in report["rows"]}
    assert len(held) == 8
    assert held["fpipe: each block"] < held["fpipe: nothing"]


@pytest.mark.parametrize("options", [["--placements", "linear"], ["--families"]])
def test_search_runs(options: list[str], tmp_path: Path) -> None:
    arguments = ("--ranks", "2", "--iterations", "5", *options)
    module = "benchmarks.search.run"
    done = warm.run(module, *arguments, folder=ROOT, scratch=tmp_path, timeout=280)
    assert done.code == 0, done.output
    head, rule, *rows = [line for line in done.output.splitlines() if line.startswith("|")]
    assert rows and all(line.count("|") == head.count("|") == rule.count("|") for line in rows)
