"""One process drives all ranks, on one device or on a device each."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from fpipe.definition import Definition
from fpipe.execute.controller import Enter, Finished, Gather, Reader
from fpipe.execute.header import Addend, Marked
from fpipe.execute.loading import Copies, as_traced, load
from fpipe.inputs.batch import SplitBatch
from fpipe.inputs.params import Parameters
from fpipe.inputs.signature import Goal, Signature, batch_shapes, brought_to, with_data
from fpipe.plan.gradient_kinds import squares_of
from fpipe.plan.plan import Plan
from fpipe.plan.planner import Planner
from fpipe.program.instrument import observed
from fpipe.program.program import Program
from fpipe.recording import Marks, active, timeline_of
from fpipe.transport.local import Lanes, LocalTransport, run_together

log = logging.getLogger("fpipe")

T = TypeVar("T")


class SingleController:
    """Drives all ranks of a pipeline in one thread, that of the caller: several may at one time.

    Args:
        planner: makes plans.
        reader: reads what it is called with.
        definition: says where the ranks compute. With a home, leaves may lie on any device: they
            are copied to those that read them.
    """

    def __init__(
        self,
        planner: Planner,
        reader: Reader,
        definition: Definition,
    ) -> None:
        self.planner = planner
        self._reader = reader
        self._devices = definition.devices
        self._of_stages = definition.stage_devices
        self._home = definition.home
        self._lanes: Lanes = {}
        self._looked: WeakSet[Plan] = WeakSet()

    def run(self, enter: Enter, goal: Goal, key: Any = None, name: str | None = None) -> Finished:
        """Run every rank's program to its end."""
        params, batch = enter()
        words = self._reader.key(key)
        leaves, parts, plan = self._plan(params, batch, goal)
        self._look_for_strays(plan, leaves)
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
                    self._home,
                )
                for program, own in zip(plan.programs, marks, strict=True)
            ]
            run_together(runs, LocalTransport(self._devices, self._lanes))
            total = plan.total(runs)
            squares = squares_of(plan, runs, leaves) if plan.clips else None
        if recording is not None:
            recording.timelines.append(timeline_of(plan.schedule, [own or {} for own in marks]))
        return Finished(leaves, plan, runs, total, batch, squares)

    def telling(self, goal: Goal) -> AbstractContextManager[None]:
        """There is nobody to be told."""
        return nullcontext()

    def programs(self, enter: Enter, goal: Goal) -> tuple[Program, ...]:
        """The programs of a training step on arguments of these shapes."""
        _, _, signature = self._signature(*enter(), goal)
        return self.planner(self._at_home(with_data(signature, self._of_stages))).programs

    def add_up(self, call: str, deed: str, make: Callable[[], Addend]) -> Marked:
        """The number itself: there is one process."""
        own = make()
        return own.number, own.marked

    def together(self, call: str, work: Callable[[Gather], T]) -> T:
        """There is one process."""
        return work(lambda value: [value])

    def _look_for_strays(self, plan: Plan, params: Parameters) -> None:
        """Tell the user, once for a plan, of parameters that lie where no rank reads them."""
        if self._home is None or plan in self._looked:
            return
        self._looked.add(plan)
        # A leaf of the state goes from device to device in any case.
        states = {leaf for program in plan.programs for leaf, _ in program.results.states}
        read: dict[int, set[torch.device | None]] = defaultdict(set)
        for program in plan.programs:
            for _, leaf, _ in program.bindings.params:
                read[leaf].add(self._device(program.rank))
        flat = params.stages[0]
        strays = [
            flat[leaf]
            for leaf, devices in read.items()
            if leaf not in states and flat[leaf].device not in devices
        ]
        if strays:
            log.warning(
                "parameters that lie on other devices than the stages that read them (%d, %s "
                "bytes) are copied in every step: pipe.place(params) puts them where they are read",
                len(strays),
                f"{sum(leaf.nbytes for leaf in strays):,}",
            )

    def _device(self, rank: int) -> torch.device | None:
        return None if self._devices is None else self._devices[rank]

    def _plan(self, params: Any, batch: Any, goal: Goal) -> tuple[Parameters, SplitBatch, Plan]:
        leaves, parts, signature = self._signature(params, batch, goal)
        return leaves, parts, self.planner(signature)

    def _signature(
        self, params: Any, batch: Any, goal: Goal
    ) -> tuple[Parameters, SplitBatch, Signature]:
        leaves = self._reader.params(params)
        if self._of_stages is not None and self._home is None:
            leaves = leaves.with_empty_on(self._of_stages)
        parts = self._reader.split(batch)
        signature = Signature(
            goal,
            leaves.shapes(),
            parts.rows,
            parts.kinds,
            batch_shapes(parts),
            self.planner.ambient(),
        )
        return leaves, parts, self._at_home(signature)

    def _at_home(self, signature: Signature) -> Signature:
        """With all leaves where one function is recorded."""
        return signature if self._home is None else brought_to(signature, self._home)
