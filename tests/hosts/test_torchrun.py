"""The demo's own file under torchrun tells what it tells in one process, and two hosts step alike.

Two hosts are two network namespaces with a cable between them, which may be cut. They need root and
iproute2; skipped elsewhere, with the reason.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from typing import Final

import pytest

from tests import warm
from tests.hosts import steps

ROOT: Final = Path(__file__).parents[2]
DEMO: Final = ROOT / "examples" / "gpt.py"
TORCHRUN: Final = str(Path(sys.executable).with_name("torchrun"))
# Of this process alone: a run that is killed leaves its own behind.
HOSTS: Final = tuple(f"fpipe-{os.getpid()}-{number}" for number in (0, 1))
ADDRESSES: Final = ("10.231.77.1", "10.231.77.2")


def told(output: str) -> list[str]:
    """What a run tells of training: its losses and the text at the end, without times."""
    lines = re.sub(r"[\d,]+ tokens/s", "", output).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("step "))
    return [line for line in lines[start:] if not re.match("tracing|compiling|making|ready", line)]


def under_torchrun(scratch: Path) -> str:
    """What the demo tells over two processes.

    Where torchrun starts two hosts' processes below, theirs are forks in the environment that it
    would give them: by itself it takes ten seconds of imports.
    """
    if reason_to_skip() is None:
        every = warm.run_ranks(DEMO, 2, "--smoke", folder=ROOT, scratch=scratch, timeout=240)
        assert [done.code for done in every] == [0, 0], every
        return "".join(done.output for done in every)
    command = [TORCHRUN, "--standalone", "--nproc-per-node", "2", str(DEMO), "--smoke"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_demo_under_torchrun_tells_what_it_tells_in_one_process(tmp_path: Path) -> None:
    together = told(under_torchrun(tmp_path))
    alone = warm.run(DEMO, "--smoke", folder=ROOT, scratch=tmp_path, timeout=240)
    assert alone.code == 0, alone.output
    assert together == told(alone.output)
    assert sum("loss" in line for line in together) > 10


def test_make_demo_takes_the_number_of_processes() -> None:
    def recipe(*arguments: str) -> str:
        command = ["make", "--no-print-directory", "--dry-run", "demo", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "/torchrun --standalone --nproc-per-node 2 examples/gpt.py" in recipe("PROCESSES=2")
    assert "/python examples/gpt.py" in recipe()


# ── two hosts ───────────────────────────────────────────────────────────────────────────────────


def ip(*arguments: str, check: bool = True) -> str:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True).stdout


def reason_to_skip() -> str | None:
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if shutil.which("ip") is None:
        return "needs iproute2, for `ip netns`"
    try:
        ip("netns", "add", HOSTS[0])
        ip("netns", "delete", HOSTS[0])
    except subprocess.CalledProcessError as error:
        return f"may not make network namespaces: {error.stderr.strip()}"
    return None


@pytest.fixture
def hosts() -> Iterator[None]:
    """Two namespaces that see each other and nothing else."""
    reason = reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    try:
        for host in HOSTS:
            ip("netns", "add", host)
            ip("-n", host, "link", "set", "lo", "up")
        ip(
            "link",
            "add",
            "cable",
            "netns",
            HOSTS[0],
            "type",
            "veth",
            "peer",
            "cable",
            "netns",
            HOSTS[1],
        )
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            ip("-n", host, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", host, "link", "set", "cable", "up")
        yield
    finally:
        for host in HOSTS:
            # torchrun's workers are in sessions of their own, but they cannot leave the namespace.
            for process in ip("netns", "pids", host, check=False).split():
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            ip("netns", "delete", host, check=False)


@contextmanager
def launched(*script: str) -> Iterator[list[subprocess.Popen[str]]]:
    """torchrun on both hosts, as a user would type it there; in the end nothing of it is left."""
    runs = [launch(number, *script) for number in (0, 1)]
    try:
        yield runs
    finally:
        for run in runs:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.communicate()


def launch(number: int, *script: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", HOSTS[number], TORCHRUN]
    command += ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"]
    command += ["--master-addr", ADDRESSES[0], "--master-port", "29500", *script]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "cable", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def read_until(run: subprocess.Popen[str], word: str, seconds: float) -> str:
    """The first line with a word; everything before it if there is none in time."""
    assert run.stdout is not None
    timer = Timer(seconds, os.killpg, (run.pid, signal.SIGKILL))
    timer.start()
    try:
        before = []
        for line in run.stdout:
            if word in line:
                return line
            before.append(line)
        raise AssertionError("".join(before))
    finally:
        timer.cancel()


@pytest.mark.usefixtures("hosts")
def test_two_hosts_step_as_one_process_does_until_the_cable_is_cut() -> None:
    """No connection breaks, nothing answers any more: both hosts tell of it after the timeout."""
    expected = steps.lines_of(steps.step_of(steps.pipeline_of(None)))
    with launched(str(Path(steps.__file__))) as runs:
        for run, line in zip(runs, expected, strict=True):
            assert read_until(run, "first step", 100).strip() == line
        ip("-n", HOSTS[1], "link", "set", "cable", "down")
        start = time.monotonic()
        first, second = (read_until(run, "PipelineError", 30) for run in runs)
        assert time.monotonic() - start < 4 + 10
    assert "rank 1 has not responded for" in first
    assert "the store of the process group has not answered rank 1" in second
