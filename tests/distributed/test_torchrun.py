"""The demo's own file under torchrun: the same losses and the same text as in one process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
DEMO: Final = str(ROOT / "examples" / "gpt.py")


def told(command: list[str]) -> list[str]:
    """What a run tells of training: its losses and the text at the end, without times."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.sub(r"[\d,]+ tokens/s", "", done.stdout).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("step "))
    return [line for line in lines[start:] if not re.match("tracing|compiling|ready", line)]


@pytest.mark.examples
def test_demo_under_torchrun_tells_what_it_tells_in_one_process() -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    launch = [torchrun, "--standalone", "--nproc-per-node", "2"]
    together = told([*launch, DEMO, "--smoke"])
    assert together == told([sys.executable, DEMO, "--smoke"])
    assert sum("loss" in line for line in together) > 10


def test_make_demo_takes_the_number_of_processes() -> None:
    def recipe(*arguments: str) -> str:
        command = ["make", "--no-print-directory", "--dry-run", "demo", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "/torchrun --standalone --nproc-per-node 2 examples/gpt.py" in recipe("PROCESSES=2")
    assert "/python examples/gpt.py" in recipe()
