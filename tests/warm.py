"""Programs that run in a process of their own which has imported torch already.

To import what most of them need takes longer than they do. So a server imports it once, and each
program runs in a fork of that server, as if Python had been started with it.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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
    written = scratch / "output"
    process = server().Process(target=_run, args=(program, arguments, folder, written))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode is not None
    return Done(process.exitcode, written.read_text("utf-8"))


def _run(program: Path | str, arguments: Sequence[str], folder: Path, written: Path) -> None:
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
