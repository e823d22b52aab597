"""What is in the slots of a program before it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fpipe.arguments.microbatch import SplitBatch
from fpipe.arguments.parameters import Parameters
from fpipe.arguments.shapes import device_of_keys, without_autocast
from fpipe.controller.keys import Words, keys_of
from fpipe.planning.plan import Plan
from fpipe.runtime.interpreter import Run
from fpipe.runtime.program import Program


def load(
    program: Program,
    plan: Plan,
    params: Parameters,
    parts: SplitBatch | None,
    device: torch.device | None,
    key: Words | None = None,
) -> Run:
    """A run with everything in its slots that is there from the start.

    Args:
        program: of one rank.
        plan: that the program belongs to.
        params: with the leaves of the rank's stages.
        parts: the batch; may be None if the program reads nothing of it.
        device: where batch leaves are copied to, None to leave them.
        key: of the step; may be None if the program reads none.
    """
    run = Run(program)
    slots = run.slots
    bindings = program.bindings
    for stage, leaf, slot in bindings.params:
        slots[slot] = params.stages[stage][leaf]
    for microbatch, leaf, slot in bindings.batch:
        assert parts is not None
        value = parts.leaves[microbatch][leaf]
        # A copy to the CPU must have arrived before it is read; on CUDA the stream sees to that.
        # One of pinned memory would still be under way when the caller writes there again.
        if device is not None and value.device != device:
            at_once = device.type == "cuda" and not value.is_pinned()
            value = value.to(device, non_blocking=at_once)
        slots[slot] = value
    for constant, slot in bindings.constants:
        slots[slot] = constant
    for microbatch, slot in bindings.seeds:
        slots[slot] = plan.seeds[microbatch]
    if bindings.keys:
        assert key is not None
        if device is None:
            device = device_of_keys([] if parts is None else parts.leaves[0])
        places = [(microbatch, stage) for microbatch, stage, _ in bindings.keys]
        for (_, _, slot), own in zip(bindings.keys, keys_of(key, places, device), strict=True):
            slots[slot] = own
    return run


@contextmanager
def as_traced() -> Iterator[None]:
    """Within it kernels run as they were traced: casts are in them, and must not be made again."""
    with torch.no_grad(), without_autocast():
        yield
