"""Programs that run in a process of their own which has imported torch already.

To import what most of them need takes longer than they do. So a server imports it once, and each
program runs in a fork of that server, as if Python had been started with it.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from tests.distributed.crew import server


class Done(NamedTuple):
    """What became of a program.

    Attributes:
        code: its exit code.
        output: all that it wrote.
    """

    code: int
    output: str


def run(program: Path | str, *arguments: str, folder: Path, scratch: Path, timeout: float) -> Done:
    """Run a file, or the ``main`` of a module, as ``python -W error`` does.

    Args:
        program: a path, or the name of the module.
        arguments: of its command line.
        folder: in which it runs.
        scratch: a folder for what it writes to its terminal.
        timeout: in seconds, after which it is killed.
    """
    (done,) = _run_all(program, arguments, folder, scratch, timeout, [{}])
    return done


def run_ranks(
    program: Path, count: int, *arguments: str, folder: Path, scratch: Path, timeout: float
) -> list[Done]:
    """Run a file in `count` processes, each with the environment that torchrun gives it.

    For the rest see `run`.
    """
    # The store lives here, as it lives in the launcher under torchrun. Port 0 takes a free port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    each = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return _run_all(program, arguments, folder, scratch, timeout, each)


def _run_all(
    program: Path | str,
    arguments: Sequence[str],
    folder: Path,
    scratch: Path,
    timeout: float,
    environments: Sequence[Mapping[str, str]],
) -> list[Done]:
    """Run it in a process for each environment, all at one time."""
    processes = []
    for number, environment in enumerate(environments):
        written = scratch / f"output-{number}"
        process = server().Process(
            target=_run, args=(program, arguments, folder, written, environment)
        )
        process.start()
        processes.append((process, written))
    deadline = time.monotonic() + timeout
    done = []
    for process, written in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        assert process.exitcode is not None
        done.append(Done(process.exitcode, written.read_text("utf-8")))
    return done


def _run(
    program: Path | str,
    arguments: Sequence[str],
    folder: Path,
    written: Path,
    environment: Mapping[str, str],
) -> None:
    os.environ.update(environment)
    file = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    os.chdir(folder)
    warnings.simplefilter("error")
    sys.argv = [str(program), *arguments]
    if isinstance(program, Path):
        sys.path[0] = str(program.parent)
        runpy.run_path(str(program), run_name="__main__")
    else:
        importlib.import_module(program).main()
