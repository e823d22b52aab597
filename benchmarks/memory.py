"""How many bytes of tensors a step holds at most, by the same measure for any library."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def held() -> int:
    """Bytes of all tensors of this process that Python can reach, each storage once."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        # Exactly these: the fake tensors of tracing have sizes but no memory.
        if type(found) is Tensor or type(found) is torch.nn.Parameter:
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak(run: Callable[[], Any]) -> int:
    """Most bytes that `run` holds beyond what there was before it, by torch's CPU allocator.

    Every allocation counts, also those inside of compiled code, autograd and communication; what a
    library for matrix products keeps for itself does not. Memory that was there before is not seen
    to go: let go first of what `run` would let go.
    """
    # Kept until the profiler has stopped, or the last results would be freed within the step.
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        result = run()
    del result
    assert profiler.profiler is not None
    total = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            most = max(most, total)
    return most
