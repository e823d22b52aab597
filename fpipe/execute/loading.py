"""What is in the slots of a program before it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fpipe.execute.keys import Words, keys_of
from fpipe.inputs.ambient import without_autocast
from fpipe.inputs.batch import SplitBatch
from fpipe.inputs.params import Parameters
from fpipe.inputs.signature import device_of_keys, is_dense
from fpipe.plan.plan import Plan
from fpipe.program.interpreter import Run
from fpipe.program.program import Program


def load(
    program: Program,
    plan: Plan,
    params: Parameters,
    parts: SplitBatch | None,
    device: torch.device | None,
    key: Words | None = None,
    copies: Copies | None = None,
    home: torch.device | None = None,
) -> Run:
    """A run with everything in its slots that is there from the start.

    Args:
        program: of one rank.
        plan: that the program belongs to.
        params: with the leaves of the rank's stages.
        parts: the batch; may be None if the program reads nothing of it.
        device: where parameters and batch leaves are copied to, None to leave them.
        key: of the step; may be None if the program reads none.
        copies: of leaves that other runs of the step have made.
        home: where one function was recorded for stages on several devices, else None. What it
            closes over there is copied too, and all leaves lie as copies do.
    """
    run = Run(program)
    copies = Copies() if copies is None else copies
    slots = run.slots
    bindings = program.bindings

    def here(value: Tensor) -> Tensor:
        if device is None or (value.device == device and (home is None or is_dense(value))):
            return value
        return copies.of(value, device)

    for stage, leaf, slot in bindings.params:
        slots[slot] = here(params.stages[stage][leaf])
    for microbatch, leaf, slot in bindings.batch:
        assert parts is not None
        slots[slot] = here(parts.leaves[microbatch][leaf])
    for constant, slot in bindings.constants:
        if device is not None and constant.device == home != device:
            constant = copies.of(constant, device)
        slots[slot] = constant
    copies.settle()
    for microbatch, slot in bindings.seeds:
        slots[slot] = plan.seeds[microbatch]
    if params.updating is not None:
        for stage, leaf, slot in bindings.moments:
            slots[slot] = params.updating.moments[params.place(stage, leaf)]
        for (slot,) in bindings.move:
            slots[slot] = params.move
    if bindings.keys:
        assert key is not None
        if device is None:
            device = device_of_keys([] if parts is None else parts.leaves[0])
        places = [(microbatch, number) for microbatch, number, _ in bindings.keys]
        for (_, _, slot), own in zip(bindings.keys, keys_of(key, places, device), strict=True):
            slots[slot] = own
    return run


class Copies:
    """Leaves where they are read, each copied once to a device.

    A copy to the CPU has arrived when it is returned; on CUDA the stream sees to that. Pinned
    memory would still be read when the caller may write there again: it is waited for, once.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.device], Tensor] = {}
        self._pinned: set[torch.device] = set()

    def of(self, value: Tensor, device: torch.device) -> Tensor:
        """The copy of a leaf on a device."""
        key = id(value), device
        if key not in self._made:
            if device.type == "cuda" and value.is_pinned():
                self._pinned.add(device)
            self._made[key] = value.to(device, non_blocking=device.type == "cuda", copy=True)
        return self._made[key]

    def settle(self) -> None:
        """See that the originals may be written to."""
        for device in self._pinned:
            torch.cuda.current_stream(device).synchronize()
        self._pinned.clear()


@contextmanager
def as_traced() -> Iterator[None]:
    """Within it kernels run as they were traced: casts are in them, and must not be made again."""
    with torch.no_grad(), without_autocast():
        yield
