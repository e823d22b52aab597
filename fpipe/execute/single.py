"""One process drives all ranks, on one device or on a device each, with a transport in memory."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from fpipe.errors import PipelineError
from fpipe.execute.gathering import norm_of
from fpipe.execute.header import Addend, Marked
from fpipe.execute.requests import Gather, Reader, Request
from fpipe.execute.run_result import RunResult, loss_sum
from fpipe.inputs.ambient import ambient, current, without_autocast
from fpipe.inputs.params import Parameters
from fpipe.inputs.signature import (
    Goal,
    Signature,
    batch_shapes,
    brought_to,
    refuse_elsewhere,
    with_data,
)
from fpipe.inputs.split_batch import SplitBatch
from fpipe.plan.plan import Plan
from fpipe.plan.planner import Planner
from fpipe.program.instrument import observed
from fpipe.program.interpreter import Copies, Run, load
from fpipe.program.program import Message, Program
from fpipe.program.step_timelines import ACTIVE, Marks, timeline_of
from fpipe.spec.definition import Definition

log = logging.getLogger("fpipe")

T = TypeVar("T")


class SingleController:
    """Drives all ranks of a pipeline in one thread, that of the caller: several may at one time.

    Args:
        planner: makes plans.
        reader: reads the parameters and batches of calls.
        definition: of the pipeline. With a home, leaves may lie on any device: they are copied to
            those that read them.
    """

    def __init__(
        self,
        planner: Planner,
        reader: Reader,
        definition: Definition,
    ) -> None:
        self.planner = planner
        self._reader = reader
        self._definition = definition
        self._devices = definition.devices
        self._of_stages = definition.stage_devices
        self._home = definition.home
        self._copies_params = definition.copies_params
        self._lanes: Lanes = {}
        self._looked: WeakSet[Plan] = WeakSet()

    def run(self, request: Request, goal: Goal, name: str | None = None) -> RunResult:
        """Run every rank's program to its end."""
        params, parts, signature = self._signature(request, goal)
        plan = self.planner.plans.get(signature) or self.planner(signature)
        if self._home is not None and not self._copies_params:
            self._look_for_strays(plan, params)
        recording, programs = ACTIVE.get(), plan.programs
        marks: list[Marks | None] = [None if recording is None else {} for _ in programs]
        if recording is not None or torch.autograd.profiler._is_profiler_enabled:
            programs = tuple(map(observed, programs, marks))
        with torch.no_grad(), without_autocast():
            copies, seeds = None if self._devices is None else Copies(), plan.seeds
            if request.scale != 1.0:
                seeds = tuple(seed * request.scale for seed in seeds)
            runs = [
                load(
                    program,
                    seeds,
                    params,
                    parts,
                    None if self._devices is None else self._devices[program.rank],
                    request.key,
                    copies,
                    self._home,
                    brings_params=not self._copies_params,
                )
                for program in programs
            ]
            run_together(runs, LocalTransport(self._devices, self._lanes))
            total = loss_sum(plan, runs)
            result = RunResult(self._definition, None, plan, runs, params, request.batch, total)
            if plan.clips:
                result.norm = norm_of(result)
        if recording is not None:
            recording.timelines.append(timeline_of(plan.schedule, [row or {} for row in marks]))
        return result

    def telling(self, goal: Goal) -> AbstractContextManager[None]:
        """There is nobody to be told."""
        return nullcontext()

    def programs(self, request: Request, goal: Goal) -> tuple[Program, ...]:
        """The programs of a training step on arguments of these shapes."""
        _, _, signature = self._signature(request, goal)
        signature = with_data(signature, self._of_stages)
        if self._home is not None:
            signature = brought_to(signature, self._home)
        return self.planner(signature).programs

    def add_up(self, call: str, deed: str, make: Callable[[], Addend]) -> Marked:
        """The number itself: there is one process."""
        addend = make()
        return addend.number, addend.marked

    def together(self, call: str, work: Callable[[Gather], T]) -> T:
        """There is one process."""
        return work(lambda value: [value])

    def _look_for_strays(self, plan: Plan, params: Parameters) -> None:
        """Tell the user, once for a plan, of parameters that lie where no rank reads them."""
        if plan in self._looked:
            return
        self._looked.add(plan)
        # A leaf of the state goes from device to device in any case.
        states = {leaf for program in plan.programs for leaf, _ in program.results.states}
        read: dict[int, set[torch.device | None]] = defaultdict(set)
        for program in plan.programs:
            for _, leaf, _ in program.bindings.params:
                read[leaf].add(None if self._devices is None else self._devices[program.rank])
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

    def _signature(self, request: Request, goal: Goal) -> tuple[Parameters, SplitBatch, Signature]:
        """The leaves of a request, and what its plan depends on."""
        params = self._reader.params(request.params)
        if self._of_stages is not None and self._home is None:
            params = params.with_empty_on(self._of_stages)
        parts = self._reader.batch(request.batch)
        shapes = params.shapes()
        if self._copies_params:
            refuse_elsewhere(shapes, params.state_leaves(has_state=self._definition.has_state))
            assert self._of_stages is not None
            places = zip(shapes, self._of_stages, strict=True)
            shapes = tuple(shape.brought_to(device) for shape, device in places)
        signature = Signature(
            goal,
            shapes,
            parts.rows,
            parts.kinds,
            batch_shapes(parts),
            ambient(self._definition.modes()),
        )
        if self._home is not None:  # one function is recorded with all leaves there
            signature = brought_to(signature, self._home)
        return params, parts, signature


class Lane(NamedTuple):
    """Where copies from one CUDA device to another run.

    A copy between devices takes the current streams of both, so both are apart from computation.

    Attributes:
        leaving: the stream of the device they come from.
        arriving: that of the device they go to.
    """

    leaving: torch.cuda.Stream
    arriving: torch.cuda.Stream


Lanes: TypeAlias = dict[tuple[torch.device, torch.device], Lane]


class LocalTransport:
    """Hands values over by reference, or copies them where ranks have devices of their own.

    It serves one step, so that others may run at the same time, in other threads.

    Copies between CUDA devices have a lane for each direction, ordered by events, so that they
    overlap with the computation of either device.

    Args:
        devices: the device of each rank, or None where all values stay on the device they are on.
        lanes: which steps before have used, to which those are added that are missing.

    Attributes:
        devices: as given.
    """

    def __init__(self, devices: Sequence[torch.device] | None, lanes: Lanes) -> None:
        self.devices = devices
        self._lanes = lanes
        self._mail: dict[Message, tuple[Sequence[Tensor], torch.cuda.Event | None]] = {}

    def at(self, rank: int) -> AbstractContextManager[Any]:
        """Within it the current device is that of a rank, as code of a stage expects it."""
        return current(None if self.devices is None else self.devices[rank])

    def post(self, message: Message) -> None:
        """Nothing: the values come with their own memory."""

    def send(self, message: Message, values: Sequence[Tensor]) -> None:
        """Put the values where the other rank finds them."""
        arrived = None
        if self.devices is not None:
            source, target = self.devices[message.source], self.devices[message.target]
            lane = self._lane(source, target)
            if lane is None:
                values = [value.to(target) for value in values]
            else:
                values, arrived = _copied(values, lane)
        self._mail[message] = values, arrived

    def wait_sent(self, message: Message) -> None:
        """Nothing: the receiver holds references or copies of its own."""

    def receive(self, message: Message) -> Sequence[Tensor] | None:
        """The values, once they have been sent."""
        values, arrived = self._mail.pop(message, (None, None))
        if values is not None and arrived is not None and self.devices is not None:
            _await(values, arrived, self.devices[message.target])
        return values

    def _lane(self, source: torch.device, target: torch.device) -> Lane | None:
        """None where nothing is copied, or the copy is waited for, as from and to the CPU."""
        if source == target or {source.type, target.type} != {"cuda"}:
            return None
        lane = self._lanes.get((source, target))
        if lane is None:
            new = Lane(torch.cuda.Stream(source), torch.cuda.Stream(target))
            lane = self._lanes.setdefault((source, target), new)
        return lane


def _copied(values: Sequence[Tensor], lane: Lane) -> tuple[list[Tensor], torch.cuda.Event]:
    """The values on the device that a lane leads to, and the event after which they are there."""
    lane.leaving.wait_stream(torch.cuda.current_stream(lane.leaving.device))
    with torch.cuda.stream(lane.leaving), torch.cuda.stream(lane.arriving):
        moved = [value.to(lane.arriving.device, non_blocking=True) for value in values]
    for value in values:
        if value.is_cuda:  # a stage may return what lies on the CPU
            # The sender's allocator must not reuse the memory before the copy has read it.
            value.record_stream(lane.leaving)
    return moved, lane.arriving.record_event()


def _await(values: Sequence[Tensor], arrived: torch.cuda.Event, device: torch.device) -> None:
    """Let the computation that follows on a device begin when these values are there.

    Copies of later messages may be under way behind them, which are not waited for.
    """
    compute = torch.cuda.current_stream(device)
    compute.wait_event(arrived)
    for value in values:
        # They lie in memory of the lane's, which must not be reused before they have been read.
        value.record_stream(compute)


def _advance_at(run: Run, transport: LocalTransport) -> bool:
    with transport.at(run.program.rank):
        return run.advance(transport)


def run_together(runs: Sequence[Run], transport: LocalTransport) -> None:
    """Drive all ranks to their end in one thread, each as far as its messages let it.

    Raises:
        PipelineError: an action failed.
    """
    advance = Run.advance if transport.devices is None else _advance_at
    waiting = list(runs)
    while waiting:
        before = [run.next for run in waiting]
        waiting = [run for run in waiting if not advance(run, transport)]
        if [run.next for run in waiting] == before:
            stuck = ", ".join(f"rank {r.program.rank} at instruction {r.next}" for r in waiting)
            raise PipelineError(f"no rank can go on: {stuck}")
