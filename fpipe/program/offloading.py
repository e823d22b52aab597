"""Tasks that copy parameters to the device that reads them, and gradients back to the CPU.

    parameter on the CPU ── UNSHARD ──► copy on the device ──► kernels, or a gather
    gradient on the CPU  ◄─ REDUCE_GRAD ── whole gradient ◄── kernels, or a reduction

Copies run on a stream of their own, so those that are asked for early run beside computation. A
parameter that replicas hold parts of is copied for each gather of it, and goes with it; another one
once, and goes with its last reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor

from fpipe.inputs.host_memory import CPU, empty_on_the_cpu
from fpipe.inputs.signature import Spec
from fpipe.program.tasks import Tasks
from fpipe.program.values import NOTHING, Computed, ParamValue, SumValue, Task, Value, kernel_task
from fpipe.schedule import Action, Op

_STREAMS: Final[dict[torch.device, torch.cuda.Stream]] = {}


@dataclass(frozen=True)
class Offloading:
    """The tensors that live on the CPU.

    Attributes:
        devices: of the ranks.
        pins: gradients lie in page-locked memory.
        params: the leaves of each stage's parameters, on the CPU.
        repeated: stage and leaf of those that replicas hold parts of.
    """

    devices: Sequence[torch.device]
    pins: bool
    params: Sequence[Sequence[Spec]]
    repeated: frozenset[tuple[int, int]] = frozenset()


def with_copies(tasks: Tasks, offloading: Offloading, *, tied: bool) -> Tasks:
    """The tasks with copies of what lives on the CPU, and gradients that come to lie there."""
    sums = dict(tasks.sums)
    rows = [
        list(_Copies(rank, offloading, tied=tied).row(row, tasks.sums, sums))
        for rank, row in enumerate(tasks.rows)
    ]
    return Tasks(tuple(rows), sums)


@dataclass
class _Copies:
    """The copies of one rank."""

    rank: int
    offloading: Offloading
    tied: bool
    count: int = 0
    there: dict[tuple[int, int], Computed] = field(default_factory=dict)

    def row(
        self, row: Sequence[Task], before: Mapping[SumValue, Value], sums: dict[SumValue, Value]
    ) -> Iterator[Task]:
        """The tasks of the rank, between copies; `sums` get the gradients on the CPU."""
        device = self.offloading.devices[self.rank]
        if device.type == "cpu":
            yield from row
            return
        ends: dict[Value, list[SumValue]] = {}
        for total, value in before.items():
            if total.argument == "params":
                ends.setdefault(value, []).append(total)
        for task in row:
            inputs: list[Value] = []
            for value in task.inputs:
                if isinstance(value, ParamValue):
                    yield from self._bring(value, task.action.stage)
                    inputs.append(self.there[self._key(value)])
                else:
                    inputs.append(value)
            yield task._replace(inputs=tuple(inputs))
            for value in task.outputs:
                for total in ends.get(value, ()):
                    yield self._store(total, value, sums)
        if row:
            last = Action(row[-1].action.stage, Op.RESHARD, None)
            yield kernel_task(partial(_settle, device), last, (), (), ())

    def _key(self, value: ParamValue) -> tuple[int, int]:
        return (0 if self.tied else value.stage), value.leaf

    def _bring(self, value: ParamValue, stage: int) -> Iterator[Task]:
        """The copy of a parameter, unless there is one."""
        key, parts = self._key(value), (value.stage, value.leaf) in self.offloading.repeated
        if key in self.there and not parts:
            return
        # A stage of this rank's: values of other ranks' stages come by messages.
        self.count += 1
        copy = Computed(stage, 0, f"copy {self.count}: leaf {value.leaf} of stage {value.stage}")
        self.there[key] = copy
        device = self.offloading.devices[self.rank]
        spec = self.offloading.params[value.stage][value.leaf]
        action = Action(stage, Op.UNSHARD, None)
        yield kernel_task(partial(_bring, device), action, (value,), (copy,), (spec,), spec.nbytes)

    def _store(self, total: SumValue, value: Computed, sums: dict[SumValue, Value]) -> Task:
        """The copy of a gradient on the CPU."""
        which = f"{total.leaf} of stage {total.stage}, {total.microbatch}"
        stored = sums[total] = Computed(value.stage, 0, f"gradient of leaf {which}, on the CPU")
        kernel = partial(_store, self.offloading.pins)
        action = Action(value.stage, Op.REDUCE_GRAD, None)
        return kernel_task(kernel, action, (value,), (stored,), (NOTHING,))


def _stream(device: torch.device) -> torch.cuda.Stream:
    """Where copies from and to a device run."""
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)
    return _STREAMS[device]


def _bring(device: torch.device, values: list[Tensor]) -> list[Tensor]:
    """A kernel: the copy of a tensor of the CPU on a device."""
    value = values.pop()
    if device.type != "cuda":
        return [value.to(device, copy=True)]
    lane, compute = _stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(lane):
        copy = value.to(device, non_blocking=True, copy=True)
    compute.wait_stream(lane)
    copy.record_stream(compute)
    return [copy]


def _store(pins: bool, values: list[Tensor]) -> list[Tensor]:
    """A kernel: the copy of a device's tensor on the CPU, which is there after `settle`."""
    value = values.pop()
    if value.device.type != "cuda":
        return [value.to(CPU)]
    lane = _stream(value.device)
    lane.wait_stream(torch.cuda.current_stream(value.device))
    stored = empty_on_the_cpu(torch.empty_like(value, device="meta"), pin=pins)
    with torch.cuda.stream(lane):
        stored.copy_(value, non_blocking=True)
    value.record_stream(lane)
    return [stored]


def settle(device: torch.device) -> None:
    """Wait until what has been copied from and to a device is there."""
    if device in _STREAMS:
        _STREAMS[device].synchronize()


def settle_all() -> None:
    """Wait until all that has been copied is there."""
    for device in list(_STREAMS):
        settle(device)


def _settle(device: torch.device, values: list[Tensor]) -> list[Tensor]:
    """A kernel: neither parameters are read any more, nor gradients written."""
    settle(device)
    return []
