"""Instrument a program: wrap its kernels, and leave everything else as it is.

The interpreter knows nothing of it, so a program that is not instrumented pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fpipe.pieces.boxed import Boxed
from fpipe.program.program import Compute, Program
from fpipe.program.replica_collectives import Begin, UnderWay, Wait
from fpipe.program.step_timelines import Marks
from fpipe.schedule import Action, Op
from fpipe.schedule.action import SHARDING_OPS

Wrap = Callable[[Boxed, Action], Boxed]


def instrument(program: Program, wrap: Wrap) -> Program:
    """`program` with every kernel replaced by ``wrap(kernel, action)``."""
    return replace(
        program,
        instructions=tuple(
            i._replace(call=wrap(i.call, i.action)) if isinstance(i, Compute) else i
            for i in program.instructions
        ),
    )


def timed(marks: Marks, *, alone: bool = False) -> Wrap:
    """Write start and end of each action into `marks`, in seconds of the host's monotonic clock.

    On CUDA what was computed before is waited for, with the messages that it read, and the action,
    so that its time is its own: no two actions overlap then, but messages go on.

    Args:
        marks: where they are written.
        alone: those of sharding are the collectives that they begin, and nothing else runs until
            those have ended.
    """

    def wrap(call: Boxed, action: Action) -> Boxed:
        # A collective is shown where it is begun, and other actions run until it is waited for.
        ends_later = isinstance(call, Wait)
        whole = alone and action.op in SHARDING_OPS

        def timed_call(inputs: list[Tensor]) -> Sequence[Tensor]:
            _await(inputs)
            start = perf_counter()
            outputs = call(inputs)
            if whole and isinstance(call, Begin):
                _await([value.wait() for value in outputs if isinstance(value, UnderWay)])
            else:
                _await(outputs)
            end = perf_counter()
            if whole:
                if isinstance(call, Begin):
                    marks[action] = (marks.get(action, (start, end))[0], end)
                return outputs
            # Parts of a gradient that several stages have are added up one by one; the parameters
            # may be prepared again for microbatches of another shape, which is not their UNSHARD.
            first = marks.get(action)
            if first is None or (action.op == Op.REDUCE_GRAD and not ends_later):
                marks[action] = (start if first is None else first[0], end)
            return outputs

        return timed_call

    return wrap


def _await(values: Sequence[Any]) -> None:
    # Not for all that the device does: NCCL may wait there for ranks that wait for this one.
    for device in {v.device for v in values if isinstance(v, Tensor) and v.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def labelled(call: Boxed, action: Action) -> Boxed:
    """Show the action as ``PP:2F0`` to a profiler that is running."""
    label = f"PP:{action}"

    def labelled_call(inputs: list[Tensor]) -> Sequence[Tensor]:
        with torch.profiler.record_function(label):
            return call(inputs)

    return labelled_call


def observed(program: Program, marks: Marks | None, *, alone: bool = False) -> Program:
    """`program` for whoever is looking: recorded into `marks`, profiled, both or neither."""
    if marks is not None:
        program = instrument(program, timed(marks, alone=alone))
    if torch.autograd.profiler._is_profiler_enabled:
        program = instrument(program, labelled)
    return program
