"""One process drives all ranks, on one device or on a device each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import optree
import torch

from fpipe.arguments.microbatch import SplitBatch
from fpipe.arguments.parameters import Parameters
from fpipe.arguments.shapes import Goal, Signature, batch_shapes, with_data
from fpipe.controller.controller import Enter, Finished, Gather, Reader
from fpipe.controller.header import Marked
from fpipe.controller.loading import Copies, as_traced, load
from fpipe.planning.plan import Plan
from fpipe.planning.planner import Planner
from fpipe.recording import Marks, active, timeline_of
from fpipe.runtime.instrument import observed
from fpipe.runtime.local import Lanes, LocalTransport, run_together
from fpipe.runtime.program import Program

T = TypeVar("T")


class SingleController:
    """Drives all ranks of a pipeline in one thread, that of the caller: several may at one time.

    Args:
        planner: makes plans.
        reader: reads what it is called with.
        devices: the device of each rank, or None.
    """

    def __init__(
        self,
        planner: Planner,
        reader: Reader,
        devices: Sequence[torch.device] | None,
    ) -> None:
        self._planner = planner
        self._reader = reader
        self._devices = devices
        self._lanes: Lanes = {}

    def run(self, enter: Enter, goal: Goal, key: Any = None, name: str | None = None) -> Finished:
        """Run every rank's program to its end."""
        params, batch = enter()
        words = self._reader.key(key)
        leaves, parts, plan = self._plan(params, batch, goal)
        with as_traced():
            recording = active()
            marks: list[Marks | None] = [None if recording is None else {} for _ in plan.programs]
            copies = Copies()
            runs = [
                load(
                    observed(program, own),
                    plan,
                    leaves,
                    parts,
                    self._device(program.rank),
                    words,
                    copies,
                )
                for program, own in zip(plan.programs, marks, strict=True)
            ]
            run_together(runs, LocalTransport(self._devices, self._lanes))
            total = plan.total(runs)
        if recording is not None:
            recording.timelines.append(timeline_of(plan.schedule, [own or {} for own in marks]))
        return Finished(leaves, plan, runs, total, batch)

    def programs(self, enter: Enter) -> tuple[Program, ...]:
        """The programs of a training step on arguments of these shapes."""
        _, _, signature = self._signature(*enter(), "step")
        devices = self._devices and [self._devices[rank] for rank in self._planner.placement]
        return self._planner(with_data(signature, devices)).programs

    def add_up(self, call: str, deed: str, make: Callable[[], Marked]) -> Marked:
        """The number itself: there is one process."""
        return make()

    def together(self, call: str, work: Callable[[Gather], T]) -> T:
        """There is one process."""
        return work(lambda value: [value])

    def readers(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The ranks that read a parameter, by stage and leaf, as far as was planned."""
        return self._planner.readers()

    def structure(self) -> optree.PyTreeSpec | None:
        """That of the first stage's parameters as last planned, None if nothing was."""
        return self._planner.structure()

    def _device(self, rank: int) -> torch.device | None:
        return None if self._devices is None else self._devices[rank]

    def _plan(self, params: Any, batch: Any, goal: Goal) -> tuple[Parameters, SplitBatch, Plan]:
        leaves, parts, signature = self._signature(params, batch, goal)
        return leaves, parts, self._planner(signature)

    def _signature(
        self, params: Any, batch: Any, goal: Goal
    ) -> tuple[Parameters, SplitBatch, Signature]:
        leaves = self._reader.params(params)
        if self._devices is not None:
            leaves = leaves.with_empty_on([self._devices[r] for r in self._planner.placement])
        parts = self._reader.split(batch)
        signature = Signature(
            goal,
            leaves.shapes(),
            parts.rows,
            parts.kinds,
            batch_shapes(parts),
            self._planner.ambient(),
        )
        return leaves, parts, signature
