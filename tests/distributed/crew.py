"""Processes that are the ranks of a group, and run what a test asks of them.

A crew lives through many calls, so that a test file pays for its start once. The store lives in the
parent, as it lives in the launcher under torchrun, so that any rank may be killed or stopped; or on
rank 0, as it does for a script that is started by hand.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tests.seldom  # noqa: F401
from fpipe import PipelineError
from fpipe.execute import watch


class Failure(NamedTuple):
    """What a rank raised."""

    kind: str
    text: str
    rank: int | None
    stage: int | None
    microbatch: int | None
    action: str | None
    cause: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        named = error if isinstance(error, PipelineError) else PipelineError("")
        return cls(
            type(error).__name__,
            str(error),
            named.rank,
            named.stage,
            named.microbatch,
            named.action,
            f"{type(error.__cause__).__name__}: {error.__cause__}" if error.__cause__ else "",
            "".join(traceback.format_exception(error)),
        )


@dataclass
class Outcome:
    """What came of a call: a value or a failure; neither for a rank that vanished."""

    value: Any = None
    failure: Failure | None = None
    seconds: float = 0.0

    @property
    def error(self) -> Failure:
        """The failure, which there must be."""
        assert self.failure is not None, f"nothing was raised, but returned: {self.value!r:.200}"
        return self.failure


def attempt(function: Callable[..., Any], *arguments: Any) -> Outcome:
    """Call a function and keep what comes of it."""
    start = time.monotonic()
    try:
        outcome = Outcome(value=function(*arguments))
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        outcome = Outcome(failure=Failure.of(error))
    outcome.seconds = time.monotonic() - start
    return outcome


@cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of all processes, made once: the threads of each group wake all the time."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """What every rank returned; fails with the traceback of one that raised."""
    for rank, outcome in enumerate(outcomes):
        if outcome.failure is not None:
            raise AssertionError(f"rank {rank} failed:\n{outcome.failure.traceback}")
    return [outcome.value for outcome in outcomes]


class Crew:
    """Ranks of one gloo group, to be used in a ``with`` block; at its end no process is left.

    Args:
        world: number of processes.
        host: the rank that hosts the store, None for the parent.
    """

    def __init__(self, world: int, host: int | None = None) -> None:
        self._store: dist.TCPStore | None = None
        port = 0
        if host is None:
            # Port 0 takes a free port; the store lives as long as the crew.
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        self.closed = False
        self.processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        self._called: tuple[int, ...] = ()
        self._groups = {tuple(range(world))}
        order = range(world) if host is None else [host, *(r for r in range(world) if r != host)]
        started: dict[int, tuple[ForkServerProcess, Connection]] = {}
        for rank in order:
            here, there = server().Pipe()
            process = server().Process(
                target=_serve, args=(rank, world, port, rank == host, there), daemon=True
            )
            process.start()
            there.close()
            started[rank] = process, here
            if rank == host:
                port = here.recv()
        for rank in range(world):
            self.processes.append(started[rank][0])
            self._pipes.append(started[rank][1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill whatever is left."""
        self.closed = True
        for rank, process in enumerate(self.processes):
            if process.is_alive():
                self.signal(rank, signal.SIGKILL)
        for process in self.processes:
            process.join(10)
            assert not process.is_alive(), "a killed process is still there"
        for pipe in self._pipes:
            pipe.close()

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank."""
        pid = self.processes[rank].pid
        assert pid, "a process that has not started"  # 0 would mean this whole group of processes
        os.kill(pid, number)

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: Sequence[int] | None = None,
        lost: Collection[int] = (),
        timeout: float = 60.0,
    ) -> list[Outcome]:
        """Call ``function(group, *arguments)`` on `ranks`, which make up the group, in their order.

        Args:
            function: importable by name.
            arguments: picklable.
            ranks: all of them by default.
            lost: those that are not expected to answer.
            timeout: seconds after which the test fails.

        Returns:
            What came of it on each rank.
        """
        self.start(function, *arguments, ranks=ranks)
        return self.collect(lost=lost, timeout=timeout)

    def start(
        self, function: Callable[..., Any], *arguments: Any, ranks: Sequence[int] | None = None
    ) -> None:
        """The first half of `run`."""
        everyone = tuple(range(len(self._pipes)))
        self._called = everyone if ranks is None else tuple(ranks)
        if self._called not in self._groups:
            # Every process takes part in making a group, also those that are not in it.
            self._groups.add(self._called)
            for pipe in self._pipes:
                pipe.send((None, (), self._called))
        for rank in self._called:
            self._pipes[rank].send((function, arguments, self._called))

    def collect(self, *, lost: Collection[int] = (), timeout: float = 60.0) -> list[Outcome]:
        """The second half of `run`."""
        outcomes = {rank: Outcome() for rank in self._called}
        waiting = set(self._called) - set(lost)
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait([self._pipes[rank] for rank in waiting], deadline - time.monotonic())
            if not ready:
                for rank in waiting:
                    self.signal(rank, signal.SIGUSR1)  # prints where it is
                time.sleep(1)
                self.close()
                raise AssertionError(f"ranks {sorted(waiting)} hang")
            for rank in [rank for rank in waiting if self._pipes[rank] in ready]:
                try:
                    outcomes[rank] = pickle.loads(self._pipes[rank].recv_bytes())
                except EOFError:
                    self.close()
                    raise AssertionError(f"rank {rank} ended without an answer") from None
                waiting.discard(rank)
        return [outcomes[rank] for rank in self._called]


# What a compiled step, a model of Hugging Face's and a benchmark import when they are there, which
# takes seconds in each process.
_LATER = (
    "tests.compiling",
    "torch.distributed.pipelining",
    "transformers.modeling_utils",
    "torch._decomp.decompositions_for_jvp",
    "sympy.tensor",
)


@cache
def server() -> ForkServerContext:
    """New processes are forks of one that has imported everything and has no threads yet."""
    context = mp.get_context("forkserver")
    assert isinstance(context, ForkServerContext)
    context.set_forkserver_preload(["torch", "fpipe.entry", "tests.models", *_LATER])
    return context


def _serve(rank: int, world: int, port: int, hosts: bool, pipe: Connection) -> None:
    """What each process does: answer calls until the parent goes."""
    torch.set_num_threads(1)
    watch.DEAD = 2.0  # a rank that is lost is waited for less long than its 3 s
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=hosts, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    if hosts:
        pipe.send(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    groups = {tuple(range(world)): dist.group.WORLD}
    while True:
        try:
            function, arguments, ranks = pipe.recv()
        except EOFError:
            break
        if function is None:
            groups[ranks] = dist.new_group(list(ranks))
            continue
        # Pickled here, because the pipe of torch would send tensors as handles to shared memory.
        pipe.send_bytes(pickle.dumps(attempt(function, groups[ranks], *arguments)))
    # No tidy shutdown: it would wait for ranks that a test has killed.
    os._exit(0)
