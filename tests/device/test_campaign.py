"""The script of all that only a GPU can show: limits, files as it goes, and no device."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device import campaign
from tests.device.campaign import BUDGET, PARTS, ROOT, Part


def python(name: str, code: str, limit: float = 60.0) -> Part:
    """A part that runs a line of Python, by way of a module that takes one."""
    return Part(name, "timeit", ("-n1", "-r1", code), limit)


def test_parts_run_in_turn_and_each_has_its_file(tmp_path: Path) -> None:
    parts = [python("good", "print('seen')"), python("bad", "raise SystemExit")]
    lines = campaign.run(parts, tmp_path, budget=100, head="today")
    assert [line.split(" | ")[-1] for line in lines] == ["passed |", "failed with code 1 |"]
    assert "seen" in (tmp_path / "good.txt").read_text()
    summary = (tmp_path / "summary.md").read_text().splitlines()
    assert summary[0] == "today" and summary[-2:] == lines


def test_a_part_ends_at_its_limit_with_all_that_it_started(tmp_path: Path) -> None:
    child = "import time; time.sleep(300)"
    code = (
        "import subprocess, sys, time; "
        f"print('began', subprocess.Popen([sys.executable, '-c', '{child}']).pid, flush=True); "
        "time.sleep(300)"
    )
    parts = [python("long", code, limit=3), python("next", "pass")]
    lines = campaign.run(parts, tmp_path, budget=100)
    assert "ended after its limit of 3 s" in lines[0] and "passed" in lines[1]
    found = re.search(r"began (\d+)", (tmp_path / "long.txt").read_text())
    assert found is not None
    for _ in range(100):
        if is_gone(int(found[1])):
            return
        time.sleep(0.1)
    raise AssertionError(lines)


def is_gone(number: int) -> bool:
    """Whether a process has ended; one that nobody has waited for counts as ended."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_parts_for_which_no_time_is_left(tmp_path: Path) -> None:
    lines = campaign.run([python("late", "pass")], tmp_path, budget=0)
    assert "no time was left" in lines[0] and not (tmp_path / "late.txt").exists()


def test_a_signal_ends_the_part_and_keeps_what_is_there(tmp_path: Path) -> None:
    code = f"""
import signal, sys
from pathlib import Path
from tests.device import campaign
signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
parts = [
    campaign.Part("first", "timeit", ("-n1", "-r1", "pass"), 60),
    campaign.Part("second", "timeit", ("-n1", "-r1", "import time; time.sleep(300)"), 60),
]
campaign.run(parts, Path({str(tmp_path)!r}), 100)
"""
    process: Any = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        for _ in range(600):
            if (tmp_path / "second.txt").exists():
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, says = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "stopped" in says and process.returncode == 1
    assert "| first |" in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_what_a_part_names_is_there(part: Part) -> None:
    assert importlib.util.find_spec(part.module) is not None
    for argument in part.arguments:
        if argument.startswith("tests"):
            assert (ROOT / argument.partition("::")[0]).exists(), argument
    assert 0 < part.limit < BUDGET


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.device.campaign"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "there is no CUDA device here" in done.stdout
