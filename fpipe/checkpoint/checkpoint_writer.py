"""Write tensors by name to a directory of `torch.distributed.checkpoint`, whole or not at all.

    tensors of each process ──► plans ──► a file of each process ──► path.partial ──► path

Each file has a mark, a random number, which the list of all tensors holds as well: so files of
several checkpoints in one directory are found out when they are read.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from fpipe.checkpoint.checkpoint_files import HEAD, MARK
from fpipe.errors import FpipeError, PipelineError, error_text
from fpipe.live_line import working

T = TypeVar("T")

FACTS: Final = "training.pt"
"""The file of what is no tensor by name."""


@dataclass(frozen=True)
class Content:
    """The content of a checkpoint. Nobody may change the tensors until it is written.

    Attributes:
        tensors: of this process. Where several processes have one, one of them writes it.
        facts: of this process; anything that can be pickled.
        join: from the marks and the facts of all processes to what `FACTS` holds; None for no such
            file.
    """

    tensors: Mapping[str, Tensor]
    facts: Any = None
    join: Callable[[list[int], list[Any]], Any] | None = None


class Processes(NamedTuple):
    """Those that write a checkpoint together.

    Attributes:
        rank: of this one among them.
        gather: takes a picklable value of each, and returns all of them. A `RuntimeError` says that
            one is gone.
    """

    rank: int
    gather: Callable[[Any], list[Any]]


ALONE: Final = Processes(0, lambda value: [value])


def absolute(path: str | PathLike[str]) -> Path:
    """A path that stays the same when the process goes to another folder."""
    return Path(os.path.abspath(path))


def write(
    path: Path, content: Content, processes: Processes = ALONE, keep: int | None = None
) -> None:
    """Write a checkpoint; all processes call this.

    Args:
        path: of the directory, absolute. A checkpoint that is there is replaced.
        content: of this process.
        processes: that write it together.
        keep: how many directories with `FACTS` stay in the parent directory; None for all.

    Raises:
        PipelineError: a process cannot write, or is gone; on all processes. The old content of
            `path` is still there.
    """
    # It takes a second to import.
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

    rank = processes.rank
    first = rank == 0
    partial = path.with_name(path.name + ".partial")
    planner, writer = DefaultSavePlanner(), FileSystemWriter(partial)
    mark = secrets.randbits(62)

    def prepare() -> tuple[Any, int, Any]:
        if first:
            _check_replaceable(path)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        tensors = {**content.tensors, f"{MARK}{mark}": torch.tensor(mark, device="cpu")}
        planner.set_up_planner(tensors, writer.storage_meta(), first)
        writer.set_up_storage_writer(first)
        return planner.create_local_plan(), mark, content.facts

    def divide() -> Any:
        if not first:
            return None
        plans, metadata = planner.create_global_plan([plan for plan, _, _ in prepared])
        return writer.prepare_global_plan(plans), metadata

    def fill() -> Any:
        return writer.write_data(planner.finish_plan(plans[rank]), planner).wait()

    def finish() -> None:
        if not first:
            return
        writer.finish(metadata, written)
        if content.join is not None:
            marks, facts = [mark for _, mark, _ in prepared], [facts for _, _, facts in prepared]
            with open(partial / FACTS, "wb") as file:
                torch.save(content.join(marks, facts), file)
                file.flush()
                os.fsync(file.fileno())
        _put_in_place(partial, path)
        if keep is not None:
            _keep_last(path, keep)

    try:
        with working(f"saving {path.name}"):
            prepared = _together(path, processes, prepare)
            plans, metadata = _together(path, processes, divide)[0]
            written = _together(path, processes, fill)
            _together(path, processes, finish)
    except PipelineError:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


class PendingSave:
    """A checkpoint that is written by a thread, while the process goes on.

    The process does not end before the thread does.

    Args:
        path: of the checkpoint.
        work: writes it.
    """

    def __init__(self, path: Path, work: Callable[[], None]) -> None:
        self._path = path
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="fpipe save")
        self._thread.start()

    def __repr__(self) -> str:
        return f"<{'finished' if self.done() else 'pending'} save of {self._path}>"

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is whole, and has its name.

        Args:
            timeout: seconds; None for as long as it takes.

        Raises:
            PipelineError: it was not written; the first call says why, and so does the next save.
            TimeoutError: it is not whole yet.
        """
        self._thread.join(timeout)
        if not self.done():
            raise TimeoutError(f"{self._path} is not whole after {timeout} s")
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error


def _together(path: Path, processes: Processes, work: Callable[[], T]) -> list[T]:
    """Gather what each process returns; where one fails, all do.

    Raises:
        PipelineError: says which, and why.
    """
    failure: Exception | None = None
    mine: tuple[Any, str | None]
    try:
        mine = work(), None
    except Exception as error:
        failure, mine = error, (None, error_text(error))
    try:
        everyone = processes.gather(mine)
    except RuntimeError as error:
        raise PipelineError(
            f"{path} was not written: another process is gone ({error_text(error)})"
        ) from (failure or error)
    for rank, (_, problem) in enumerate(everyone):
        if problem is not None:
            at = "" if len(everyone) == 1 else f"rank {rank}: "
            raise PipelineError(f"{path} was not written: {at}{problem}", rank=rank) from failure
    return [value for value, _ in everyone]


def _check_replaceable(path: Path) -> None:
    """Refuse to put a checkpoint in the place of what is none."""
    if not path.exists() or (path / HEAD).is_file():
        return
    if not path.is_dir() or any(path.iterdir()):
        raise FpipeError(
            "something else than a checkpoint is there, which would be replaced: give the path of "
            "a directory of its own, such as step-100 within it"
        )


def _put_in_place(partial: Path, target: Path) -> None:
    """Give a whole checkpoint its name; at every moment there is a whole one."""
    old = beside(target)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(target, old)
    os.replace(partial, target)
    shutil.rmtree(old, ignore_errors=True)


def beside(target: Path) -> Path:
    """Where the checkpoint before lies while another one takes its place."""
    return target.with_name(target.name + ".old")


def _keep_last(target: Path, keep: int) -> None:
    """Delete all but the last checkpoints beside this one."""
    whole = [place for place in target.parent.iterdir() if (place / FACTS).is_file()]
    whole = [place for place in whole if place.suffix not in (".partial", ".old")]
    for place in sorted(whole, key=lambda place: (place / FACTS).stat().st_mtime)[:-keep]:
        with suppress(OSError):
            shutil.rmtree(place)
