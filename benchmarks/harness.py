"""What every benchmark shares: interleaved timing, the machine, a table and a results file."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shlex
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Final

import torch

from fpipe.cli.options import count

WARMUP: Final = 3

Cell = str | float | None


def keep_memory() -> None:
    """Let glibc keep what this process frees, for its next allocation.

    It gives the end of its heap back to the system whenever enough of it is free, and each page
    that is taken again costs a fault. How much of that falls to which case is chance.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # names of malloc.h
        mallopt(trim_threshold, 1 << 30)
        mallopt(mmap_threshold, 1 << 25)


@dataclass(frozen=True)
class Timings:
    """Seconds of each case in each round."""

    seconds: Mapping[str, Sequence[float]]

    def median(self, case: str) -> float:
        """The middle time of a case, in seconds."""
        return median(self.seconds[case])

    def ratio(self, case: str, base: str) -> float:
        """How much longer `case` takes than `base`: the median of the ratios within each round.

        What slows the whole machine down for a while slows both of a round, so it cancels here,
        which it does not in a ratio of medians.
        """
        pairs = zip(self.seconds[case], self.seconds[base], strict=True)
        return median(mine / theirs for mine, theirs in pairs)


def interleave(
    cases: Mapping[str, Callable[[], object]],
    rounds: int,
    synchronize: Callable[[], object] = lambda: None,
    repeats: int = 1,
) -> Timings:
    """Run every case in each round, and time it.

    Args:
        cases: what to run, by name.
        rounds: how many times to time each. The first `WARMUP` runs of a case are not timed.
        synchronize: waits for the device. It is called before the clock is read.
        repeats: how many runs in a row to time as one, and to divide by. A run that is shorter than
            the time it takes to fill the caches after another case needs several.
    """
    for run in cases.values():
        for _ in range(WARMUP):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    order = list(cases)
    for _ in range(rounds):
        for name in order:
            synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                cases[name]()
            synchronize()
            seconds[name].append((time.perf_counter() - start) / repeats)
        order.reverse()  # no case always runs in the cache that the same other one left
    return Timings(seconds)


@dataclass(frozen=True)
class Report:
    """The outcome of a benchmark: a table, and all one needs to make it again."""

    title: str
    command: str
    machine: Mapping[str, str]
    settings: Mapping[str, Cell]
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def markdown(self) -> str:
        """The report as a page."""
        facts = [f"- {name}: {value}" for name, value in {**self.machine, **self.settings}.items()]
        return "\n".join(
            [f"# {self.title}", "", f"    {self.command}", "", *facts, "", *self.table(), ""]
        )

    def table(self) -> list[str]:
        """The lines of the table, in Markdown, aligned to be read as text as well."""
        lines = [list(self.columns), *([_show(cell) for cell in row] for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
        lines.insert(1, rule)
        return [
            "| "
            + " | ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            + " |"
            for line in lines
        ]

    def json(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"


def _show(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:.3f}" if cell < 10 else f"{cell:.1f}"
    return "–" if cell is None else str(cell)


def add_arguments(parser: argparse.ArgumentParser, rounds: int) -> None:
    """The options that every benchmark has."""
    parser.add_argument("--rounds", type=count, default=rounds, help="timed runs of each case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write it as Markdown")


def add_uncompiled(parser: argparse.ArgumentParser) -> None:
    """The option to compile nothing: its figures mean little, but show soon that all of it runs."""
    parser.add_argument("--uncompiled", action="store_true", help="to see that it runs, sooner")


def add_awake(parser: argparse.ArgumentParser) -> None:
    """The option of `awake`."""
    parser.add_argument("--awake", action="store_true", help="no core sleeps (Linux, root)")


@contextmanager
def awake(wanted: bool) -> Iterator[None]:
    """Let no core sleep meanwhile, if that is `wanted`: no wake-up may take longer than nothing.

    Linux waits for as short as the least of what processes have asked for, as long as they hold the
    file open (Documentation/power/pm_qos_interface.rst).
    """
    if not wanted:
        yield
        return
    with Path("/dev/cpu_dma_latency").open("wb", buffering=0) as longest:
        longest.write(struct.pack("i", 0))
        yield


def publish(report: Report, arguments: argparse.Namespace) -> None:
    """Print the report, and write the files that were asked for."""
    print(report.markdown())
    if arguments.json:
        arguments.json.write_text(report.json(), encoding="utf-8")
    if arguments.markdown:
        arguments.markdown.write_text(report.markdown(), encoding="utf-8")


def command(module: str) -> str:
    """The command line that was typed, for a benchmark that runs as ``python -m module``."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def machine(device: torch.device) -> dict[str, str]:
    """What a reader must know to compare the figures with their own."""
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["cuda"] = str(torch.version.cuda)
    return facts


def _processor() -> str:
    """Its name, with family and model where that is told: virtual machines name the maker alone."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    if "model name" not in facts:
        return platform.machine()
    if "cpu family" not in facts:
        return facts["model name"]
    return f"{facts['model name']} (family {facts['cpu family']}, model {facts['model']})"
