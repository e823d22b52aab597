"""Ranks that have a CUDA device each, and what carries their messages."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fpipe.spec.placing import device_of
from fpipe.transport.connect import connect
from fpipe.transport.group import GroupTransport

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks(ranks: int) -> None:
    """Steps, values and norms over NCCL, and a fault: with a device each, or one for both."""
    emulated = {"EMULATED": "1"} if "tests.device.emulated" in sys.modules else {}
    command = "-m torch.distributed.run --standalone -m --nproc-per-node"
    done = subprocess.run(
        [sys.executable, *command.split(), str(ranks), "tests.device.ranks"],
        env=os.environ | emulated,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


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
