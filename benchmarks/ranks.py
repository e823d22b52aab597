"""What benchmarks over several processes share: starting ranks, and timing them together.

on_ranks(2, work, …) ──► rank 0: work(0, …) ─► what it returns
                    └──► rank 1: work(1, …)
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.harness import WARMUP, Timings


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``function(rank, *arguments)`` in `world` fresh processes, the ranks of a gloo group.

    They are forks of one that has imported what takes longest, and nothing else. Each computes with
    one thread. When one fails, the others are ended and its error is raised.

    Args:
        world: number of processes.
        function: importable by name, so that a fresh interpreter finds it.
        arguments: picklable.

    Returns:
        What the function returns on rank 0; it must be picklable.
    """
    # The store lives here, as it lives in the launcher under torchrun. Port 0 takes a free port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.pipelining", "fpipe.entry"])
    receiver, sender = context.Pipe(duplex=False)
    ranks = mp.start_processes(
        _rank,
        (world, store.port, sender, function, arguments),
        nprocs=world,
        join=False,
        start_method="forkserver",
    )
    value = None
    ended = False
    while not ended:
        ended = ranks.join(timeout=0.1)  # raises what a rank raised
        if receiver.poll():
            value = receiver.recv()
    return value


def _rank(
    rank: int,
    world: int,
    port: int,
    sender: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(minutes=5))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    value = function(rank, *arguments)
    if rank == 0:
        sender.send(value)
    dist.barrier()  # a rank that leaves early would break the others' connections
    sys.stdout.flush()
    sys.stderr.flush()
    # No tidy shutdown: helper threads of compilers and pipelines may still be about. But semaphores
    # go with the finalizers alone: torch's tracing makes one, the lock of a progress bar.
    util._run_finalizers(0)  # type: ignore[attr-defined]
    os._exit(0)


def interleave_ranks(
    cases: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = WARMUP,
    *,
    repeats: int = 1,
) -> Timings:
    """Run every case once in each round on all ranks at once, and time it.

    A case takes from the first rank's start to the last rank's end, over how often it ran. All
    ranks read one clock: they are processes of one machine.

    Args:
        cases: what this rank does in each case; the names must be the same on every rank.
        rounds: how many times to time each.
        warmup: runs of each case before, which are not timed.
        repeats: runs in a row that are timed together.

    Returns:
        The same on every rank.
    """
    order = list(cases)
    for name in order:
        for _ in range(warmup):
            dist.barrier()
            cases[name]()
    clock = torch.zeros(len(order), rounds, 2, dtype=torch.float64)
    places = list(range(len(order)))
    for number in range(rounds):
        for place in places:
            run = cases[order[place]]
            dist.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            end = time.perf_counter()
            clock[place, number, 0] = -start
            clock[place, number, 1] = end
        places.reverse()  # no case always runs in the cache that the same other one left
    # The first start is the greatest of the negative starts, so one reduction finds both ends.
    dist.all_reduce(clock, dist.ReduceOp.MAX)
    seconds = (clock.sum(-1) / repeats).tolist()
    return Timings(dict(zip(order, seconds, strict=True)))


def greatest(values: list[float]) -> list[float]:
    """The greatest of each value over all ranks."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    out: list[float] = found.tolist()
    return out
