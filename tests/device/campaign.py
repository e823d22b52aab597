"""Everything that only a GPU can show, in at most eight minutes: ``make device``.

The parts run one after the other, the most telling first, each in a process of its own and for no
longer than its limit. What a part prints lies in a file of its own under ``build/device`` while it
runs, and a line about it in ``summary.md`` as soon as it has ended. So the run may be stopped at
any time, by a signal too, and what it has shown by then is there. Without a GPU it says so, and is
done.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
BUDGET: Final = 480.0
"""Seconds for all parts."""


@dataclass(frozen=True)
class Part:
    """A command, and how long it may take.

    Attributes:
        name: of its file.
        module: that Python runs.
        arguments: of its command line.
        limit: seconds after which it is ended.
        variables: of its environment, beside those that are there.
    """

    name: str
    module: str
    arguments: Sequence[str]
    limit: float
    variables: Mapping[str, str] = field(default_factory=dict)


def _tests(name: str, limit: float, *arguments: str, **variables: str) -> Part:
    options = ("-p", "no:cacheprovider", "-m", "cuda", "-v", "--durations=5")
    return Part(name, "pytest", (*options, *arguments), limit, variables)


def _benchmark(name: str, limit: float, *arguments: str) -> Part:
    written = ("--markdown", f"build/device/results-{name}.md")
    options = ("--device", "cuda", "--rounds", "5", *written, *arguments)
    return Part(name, f"benchmarks.{name}.run", options, limit)


PARTS: Final = (
    # The kernel beside Inductor's way, and in a step.
    _tests("wgrad_kernel", 80, "-s", "tests/device/test_wgrad_kernel.py"),
    # A whole training step: tokens a second, MFU.
    _benchmark("gpt", 150),
    # Two ranks on one device, in every family; a rank that is killed.
    _tests("ranks", 90, "tests/device/test_over_ranks.py"),
    # Peaks as planned; a step as one CUDA graph.
    _tests("memory_and_graphs", 60, "tests/device/test_memory_and_graphs.py"),
    # One process, compiled stages too; training steps.
    _tests("one_process", 120, "tests/device/test_one_process.py", "tests/device/test_training.py"),
    _benchmark("split", 90),
    # Kernels of several streams under way at once.
    _tests(
        "ranks_connections",
        60,
        "tests/device/test_over_ranks.py::test_ranks",
        CUDA_DEVICE_MAX_CONNECTIONS="32",
    ),
    # The tests of CUDA that lie elsewhere, and those that need two devices.
    _tests("others", 60, "tests", "--ignore=tests/device"),
    _tests("several_devices", 60, "tests/device/test_whole_models.py"),
)


def run(parts: Sequence[Part], folder: Path, budget: float, head: str = "") -> list[str]:
    """Run parts until the budget is spent; returns what became of each, as in ``summary.md``."""
    folder.mkdir(parents=True, exist_ok=True)
    summary, lines = folder / "summary.md", []
    summary.write_text(f"{head}\n\n| part | seconds | end |\n| --- | ---: | --- |\n", "utf-8")
    start = time.monotonic()
    for part in parts:
        left = budget - (time.monotonic() - start)
        began = time.monotonic()
        end = _run_part(part, folder, min(part.limit, left)) if left > 1 else "no time was left"
        line = f"| {part.name} | {time.monotonic() - began:.0f} | {end} |"
        lines.append(line)
        with summary.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        print(line, flush=True)
    return lines


def _run_part(part: Part, folder: Path, limit: float) -> str:
    """Run one, with all that it starts in a group of processes that is ended with it."""
    with (folder / f"{part.name}.txt").open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", part.module, *part.arguments],
            cwd=ROOT,
            env=os.environ | part.variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"ended after its limit of {limit:.0f} s"
        finally:
            _end(process)
    return "passed" if code == 0 else f"failed with code {code}"


def _end(process: subprocess.Popen[Any]) -> None:
    """End what is left of a group, and give it time to end what it has started elsewhere.

    `torchrun` starts its ranks in groups of their own, and ends them when it is asked to end.
    """
    for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 2.0)):
        give_up = time.monotonic() + patience
        try:
            os.killpg(process.pid, number)
            while time.monotonic() < give_up:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.05)
        except ProcessLookupError:
            break
    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for all parts")
    parser.add_argument("--part", action="append", choices=[part.name for part in PARTS])
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("there is no CUDA device here: nothing was run (make emulate runs what needs none)")
        return
    # A signal ends the part that runs, and then the program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    names = arguments.part or [part.name for part in PARTS]
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    head = f"{now} UTC, {torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(head, flush=True)
    chosen = [part for part in PARTS if part.name in names]
    lines = run(chosen, ROOT / "build" / "device", arguments.budget, head)
    if not all("passed" in line for line in lines):
        sys.exit("not all parts have passed: build/device has what each of them printed")


if __name__ == "__main__":
    main()
