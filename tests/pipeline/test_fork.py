"""A process that is forked while another thread traces, or is in a step, can do both."""

from __future__ import annotations

import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fpipe
from fpipe.schedule import Schedule
from tests.models import boxed, mlp, plain_pipeline

MODEL = mlp(2, 4)


def in_a_child(work: Callable[[], object]) -> int:
    """The exit status of a forked process that does this, of SIGALRM after some seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


# Abstract tensors set up autograd there for CUDA, after which torch refuses what is forked.
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")
@pytest.mark.parametrize("traces", [True, False])
def test_a_fork_beside_a_thread_that_is_busy(traces: bool) -> None:
    begun, done = threading.Event(), threading.Event()

    def first(p: object, x: torch.Tensor) -> torch.Tensor:
        if traces:
            begun.set()
            done.wait(30)
        return x

    def meanwhile() -> None:
        if not traces:
            begun.set()
            done.wait(30)

    def compiled(graph: torch.fx.GraphModule, _: object) -> Any:
        return boxed(graph, meanwhile)

    schedule = Schedule.from_text("0F0 0B0")
    busy = fpipe.pipeline([first], lambda y, _: y.sum(), schedule, compile=compiled)
    idle = plain_pipeline(MODEL.stages)
    idle.step(MODEL.params, MODEL.batch)
    thread = threading.Thread(target=lambda: busy.value([torch.ones(1)], torch.ones(2)))
    thread.start()
    assert begun.wait(30)

    def work() -> None:
        idle.step(MODEL.params, MODEL.batch)
        if not traces:
            done.set()
            busy.value([torch.ones(1)], torch.ones(2))
        plain_pipeline(MODEL.stages).step(MODEL.params, MODEL.batch)

    try:
        assert in_a_child(work) == 0
    finally:
        done.set()
        thread.join()
