"""A real device: its memory is as planned, and a step can be one CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from fpipe import pytree, schedules
from tests.device.test_one_process import moved
from tests.models import assert_same, gpt

pytestmark = [pytest.mark.cuda, pytest.mark.real_device]


def wide(w: Tensor, x: Tensor) -> Tensor:
    """Big enough for what an allocator rounds to count for nothing."""
    return torch.tanh(x @ w)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ["gpipe", "one_f_one_b", "zb_h1", "zbv"])
def test_a_peak_is_as_planned(family: str, compiled: bool) -> None:
    """All ranks of one process together: none holds more than its program says."""
    schedule = schedules.get(family, ranks=1, microbatches=4)
    count = schedule.num_stages
    weights = [torch.randn(1024, 1024, device="cuda") / 32 for _ in range(count)]
    x = torch.randn(4 * 2048, 1024, device="cuda")
    pipe = fpipe.pipeline(
        [wide] * count, lambda y, _: y.square().mean(), schedule, compile=compiled
    )
    (program,) = pipe.programs(weights, x)
    for _ in range(2):  # with what cuBLAS keeps for itself
        step = pipe.step(weights, x)
    del step
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = pipe.step(weights, x)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    print(f"{family}: planned {program.peak_bytes / 2**20:.1f} MiB, taken {taken / 2**20:.1f}")
    assert 0.8 * program.peak_bytes < taken < 1.02 * program.peak_bytes + 2**20
    del step


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ["one_f_one_b", "zb_h1"])
def test_a_step_as_one_graph(family: str, compiled: bool) -> None:
    """Captured once; replayed, it computes with what lies in the same memory by then."""
    schedule = schedules.get(family, ranks=2, microbatches=4)
    model = gpt(schedule.num_stages, 8, torch.float32)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, compile=compiled)
    params, batch = moved(model.params, "cuda"), moved(model.batch, "cuda")
    others = pytree.tree_map(lambda leaf: leaf * 0.9, params)
    side: Any = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is made at first use is made outside of the graph
        for _ in range(3):
            pipe.step(params, batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = pipe.step(params, batch)
    expected = [pytree.tree_map(torch.clone, pipe.step(own, batch)) for own in (params, others)]
    graph.replay()
    assert_same(captured, expected[0], 1e-5)
    for leaf, other in zip(pytree.flatten(params)[0], pytree.flatten(others)[0], strict=True):
        leaf.copy_(other)
    graph.replay()
    assert_same(captured, expected[1], 1e-5)
