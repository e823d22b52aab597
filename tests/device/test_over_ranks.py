"""Ranks that have a CUDA device each, and what carries their messages."""

from __future__ import annotations

import gc
import sys
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fpipe.spec.placing import device_of
from fpipe.transport.connect import connect
from fpipe.transport.group import GroupTransport
from tests.device.ranks import run_as

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, values and norms over NCCL, and a fault: with a device each, or one for both."""
    if "tests.device.emulated" in sys.modules:
        monkeypatch.setenv("EMULATED", "1")
    # Forks of a process that has imported all, in the environment that torchrun gives its own.
    server = get_context("forkserver")
    server.set_forkserver_preload(["tests.device.ranks"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
    }
    files, processes = [tmp_path / str(rank) for rank in range(ranks)], []
    try:
        for rank, file in enumerate(files):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = server.Process(target=run_as, args=(own, file), daemon=True)
            process.start()
            processes.append(process)
        for process in processes:
            process.join(200)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert codes == [0] * ranks, "".join(file.read_text("utf-8") for file in files)


def test_the_device_that_a_group_is_bound_to() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    group = connect("nccl", dist.HashStore(), 0, 1, timedelta(seconds=30), device=device)
    assert device_of(group) == torch.device("cuda", torch.cuda.current_device())
    group.bound_device_id = device
    assert device_of(group) == device


def test_a_transport_that_is_dropped_waits_for_its_last_messages() -> None:
    asked: list[int] = []

    class End:
        def query(self) -> bool:
            asked.append(1)
            return len(asked) == 3

    def nobody(*_: object) -> Any:
        raise AssertionError

    transport = GroupTransport(0, torch.device("cuda", 0), nobody, nobody, nobody)
    ends: list[Any] = transport._ends
    ends.append(End())
    del transport
    gc.collect()
    assert len(asked) == 3


@pytest.mark.real_device
def test_a_channel_of_nccl() -> None:
    """A world of one rank, which sends to itself: what is to be sent and received at once."""
    store = dist.HashStore()
    place = torch.device("cuda", torch.cuda.current_device())
    channel = connect("nccl", store, 0, 1, timedelta(seconds=30), device=place)
    sent, received = torch.arange(5.0, device="cuda"), torch.zeros(5, device="cuda")
    channel._start_coalescing(place)
    channel.recv([received], 0, 0)
    channel.send([sent], 0, 0)
    channel._end_coalescing(place).wait()
    assert torch.equal(received, sent)
