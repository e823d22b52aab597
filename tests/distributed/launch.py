"""Run a function on several processes, each a rank of a gloo group; leave no process behind.

The store lives in the parent, as it lives in the launcher under torchrun, so that any rank may be
killed or stopped.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


@dataclass
class Outcome:
    """What a rank did: what it returned, or the text of what it raised; None if it vanished."""

    value: Any = None
    error: str | None = None
    seconds: float = 0.0


def run(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 90.0,
    lost: tuple[int, ...] = (),
) -> list[Outcome]:
    """Call ``function(rank, *arguments)`` in `world` processes.

    Args:
        world: number of processes.
        function: importable by name, so that a fresh interpreter can find it.
        arguments: picklable.
        timeout: seconds after which every process is killed and the test fails.
        lost: ranks that are not expected to answer.
    """
    with processes(world, function, *arguments) as (children, answers):
        outcomes: list[Outcome] = [Outcome() for _ in range(world)]
        waiting = set(range(world)) - set(lost)
        deadline = time.monotonic() + timeout
        while waiting:
            for rank in sorted(waiting):
                if answers[rank].poll(0.02):
                    outcomes[rank] = answers[rank].recv()
                    waiting.discard(rank)
                elif not children[rank].is_alive() and not answers[rank].poll(0.5):
                    raise AssertionError(f"rank {rank} ended without an answer")
            assert time.monotonic() < deadline, f"ranks {sorted(waiting)} hang"
        return outcomes


@contextmanager
def processes(
    world: int, function: Callable[..., Any], *arguments: Any
) -> Iterator[tuple[list[Any], list[Any]]]:
    """The processes of `run`, for a test that kills or stops some of them."""
    context = mp.get_context("spawn")
    # Port 0 takes a free port; the store lives as long as this frame.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children, answers = [], []
    for rank in range(world):
        here, there = context.Pipe(duplex=False)
        child = context.Process(
            target=_child,
            args=(rank, world, store.port, there, function, arguments),
            daemon=True,
        )
        child.start()
        there.close()
        children.append(child)
        answers.append(here)
    try:
        yield children, answers
    finally:
        for child in children:
            if child.is_alive():
                os.kill(child.pid, signal.SIGKILL)
            child.join(10)
        for answer in answers:
            answer.close()


def _child(
    rank: int, world: int, port: int, answer: Any, function: Callable[..., Any], arguments: Any
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    start = time.monotonic()
    try:
        outcome = Outcome(value=function(rank, *arguments))
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        outcome = Outcome(error=f"{type(error).__name__}: {error}")
    outcome.seconds = time.monotonic() - start
    answer.send(outcome)
    answer.close()
    sys.stderr.flush()
    # No tidy shutdown: it would wait for ranks that a test has killed.
    os._exit(0)
