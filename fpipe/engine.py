"""The engine of a pipeline: runs its calls, and keeps what was traced and compiled for them.

params, batch ── flatten, split ──► plan (cached per shapes) ──► slots ── programs ──► results
                                      │
                                      └ trace ─ partition ─ lower ─ compile, at the first call

`Pipeline` and the transforms show users what they call; all parts of fpipe share this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from fpipe import pytree
from fpipe.autograd.history import (
    NO_LOSS,
    has_history,
    is_tracked,
    tracked_forward,
    tracked_value,
    without_history,
)
from fpipe.autograd.levels import call_within
from fpipe.errors import FpipeError
from fpipe.execute.header import CLIPS, PREPARES, TRAINS, Addend, Marked
from fpipe.execute.multi import MultiController
from fpipe.execute.requests import Controller, Gather, Reader, Request
from fpipe.execute.run_result import RunResult
from fpipe.execute.single import SingleController
from fpipe.inputs.ambient import is_within
from fpipe.inputs.keys import read_key
from fpipe.inputs.params import Move, Updating, keep
from fpipe.inputs.signature import Goal
from fpipe.plan.planner import Planner
from fpipe.plan.stage_compiler import StageCompiler
from fpipe.program.program import Program
from fpipe.random.keyed_mode import PIPELINES_AROUND
from fpipe.spec.definition import Definition
from fpipe.spec.results import ForwardAux
from fpipe.trace.isolation import IS_TRACING, refuse_within

T = TypeVar("T")

OWN = object()
"""Stands for what the pipeline was made with."""


class Engine:
    """Runs the calls of a pipeline.

    Args:
        definition: all that the pipeline is made from.
        stage_compiler: traces and compiles the stages; None for one of its own.

    Attributes:
        definition: all that the pipeline is made from.
        schedule: what it runs.
        rank: the rank that this process drives; None if it drives all of them.
        derived: the engines that calls of this one within autograd and `torch.func` need.
        stage_compiler: traces and compiles the stages, and keeps them.
        reader: reads the arguments of calls.
    """

    def __init__(self, definition: Definition, stage_compiler: StageCompiler | None = None) -> None:
        self.definition = definition
        self.schedule = definition.schedule
        self.rank = None if definition.group is None else definition.group.rank()
        self.derived: dict[Any, Engine] = {}
        self.stage_compiler = stage_compiler or StageCompiler(definition)
        self.reader = Reader(definition)
        planner = Planner(self.stage_compiler, definition)
        self._controller: Controller = (
            SingleController(planner, self.reader, definition)
            if definition.group is None
            else MultiController(planner, self.reader, definition, definition.group)
        )

    def under(self, definition: Definition) -> Engine:
        """The engine of a definition that differs in its schedule alone.

        It shares traces and kernels with this one, unless stages move to other devices.
        """
        shares = (
            definition.schedule.num_stages == self.schedule.num_stages
            and definition.stage_devices == self.definition.stage_devices
        )
        engine = Engine(definition, stage_compiler=self.stage_compiler if shares else None)
        if shares:
            derived = list(self.derived.items())  # to which another thread may add
            schedule = definition.schedule
            engine.derived = {
                key: other.under(replace(other.definition, schedule=schedule))
                for key, other in derived
            }
        return engine

    # ── what users call, its arguments in order ─────────────────────────────────────────────────

    def in_order(
        self, goal: Goal, arguments: tuple[Any, ...], key: Tensor | None, named: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Tensor | None]:
        """The arguments after params in order, and the key; if they are wrong, all ranks know."""
        if IS_TRACING.get():
            refuse_within()
        try:
            return self.reader.in_order(arguments, key, named)
        except FpipeError as error:
            self._tell(goal, error)
            raise

    def step(
        self, params: Any, *arguments: Any, key: Tensor | None = None, scale: float = 1.0
    ) -> Any:
        """The result of `Pipeline.step`, with gradients of the loss times `scale`."""
        if is_within():
            return call_within(self, "step", params, *arguments, key=key)
        return self._run("step", (params, *arguments), key, scale=scale).step()

    def value(self, params: Any, *arguments: Any, key: Tensor | None = None) -> Any:
        """The result of `Pipeline.value`."""
        if is_within():
            return call_within(self, "value", params, *arguments, key=key)
        leaves = pytree.flatten((params, arguments))[0]
        tracked = is_tracked(leaves)
        if tracked and has_history(self):
            return tracked_value(self, params, *arguments, key=key)
        loss = self.run_value(params, *arguments, key=key)
        if tracked:
            loss = without_history(loss, leaves, NO_LOSS)
        return loss

    def forward(
        self, params: Any, *arguments: Any, key: Tensor | None = None, out_dims: Any = OWN
    ) -> Any:
        """The result of `Pipeline.forward`."""
        if out_dims is OWN:
            out_dims = self.definition.out_dims
        if is_within():
            options = {"key": key, "out_dims": out_dims}
            return call_within(self, "forward", params, *arguments, **options)
        if is_tracked(pytree.flatten((params, arguments))[0]):
            return tracked_forward(self, params, *arguments, key=key, out_dims=out_dims)
        return self.run_forward(params, *arguments, key=key, out_dims=out_dims)

    # ── what transforms and trainers call, with vectors too ─────────────────────────────────────

    def run_step(
        self, *arguments: Any, key: Tensor | None = None, name: str | None = None
    ) -> tuple[Any, ...]:
        """The loss and the gradients, as the convention returns them, and aux if there is any.

        Args:
            arguments: as the convention takes them.
            key: as in `step`.
            name: what other processes are told that was called, if not ``step``.
        """
        if is_within():
            options = {"key": key} if name is None else {"key": key, "name": name}
            return call_within(self, "run_step", *arguments, **options)
        result = self._run("step", arguments, key, name)
        loss, grads = result.loss, result.take_grads()
        if self.definition.has_aux:
            return loss, grads, result.aux(self.definition.out_dims)
        return loss, grads

    def run_updating(
        self,
        read: Callable[[], tuple[Sequence[Any], Move]],
        params: Any,
        *arguments: Any,
        key: Tensor | None = None,
        clips: bool,
        scale: float = 1.0,
        **named: Any,
    ) -> RunResult:
        """A step in which each stage is updated where the schedule says so.

        Args:
            read: returns the optimizer's state of each leaf of the parameters, in order, and its
                step of one leaf; may refuse them.
            params: as in `step`.
            arguments: as in `step`.
            key: as in `step`.
            clips: keep the gradients, and find their norm.
            scale: what the loss is multiplied with in the backward.
            named: as in `step`.
        """
        arguments, key = self.in_order("step", arguments, key, named)
        goal: Goal = "clip" if clips else "update"
        name = CLIPS if clips else TRAINS
        return self._run(goal, (params, *arguments), key, name, read, scale)

    def run_value(self, *arguments: Any, key: Tensor | None = None) -> Any:
        """The loss, as the convention returns it."""
        if is_within():
            return call_within(self, "run_value", *arguments, key=key)
        return self._run("value", arguments, key).loss

    def run_forward(self, *arguments: Any, key: Tensor | None = None, out_dims: Any = 0) -> Any:
        """The output of the last stage as it returns it, its microbatches merged."""
        if is_within():
            return call_within(self, "run_forward", *arguments, key=key, out_dims=out_dims)
        result = self._run("forward", arguments, key)
        if self.definition.function:
            return ForwardAux(result.loss, result.aux(out_dims))
        return result.output(out_dims)

    def validated(self, goal: Goal, read: Callable[[], T]) -> T:
        """Read a call's arguments with `read`; if they are wrong, raise on every rank.

        Raises:
            BatchError: in one process, as `read` raises it.
            PipelineError: over a process group, where it does, on every rank.
        """
        try:
            return read()
        except FpipeError as error:
            self._tell(goal, error)
            raise

    def _tell(self, goal: Goal, problem: FpipeError) -> None:
        """Take part in a call with wrong arguments, so that the other processes know of them."""
        if self.rank is not None:
            self._controller.run(Request(problem=problem), goal)

    def telling(self, method: str) -> AbstractContextManager[None]:
        """Within it a method is called; where it is refused, other processes are told, later."""
        goal: Goal = "step"
        for other in ("value", "forward"):
            goal = other if method.endswith(other) else goal
        return self._controller.telling(goal)

    # ── what is known of stages and parameters ──────────────────────────────────────────────────

    @_disable_dynamo  # torch.compile would go into it, for seconds
    def programs(
        self, goal: Goal, params: Any, *arguments: Any, key: Tensor | None = None, **named: Any
    ) -> tuple[Program, ...]:
        """The programs for arguments of these shapes, of a step or of one with an optimizer."""

        try:
            request = self.reader.request_of_shapes(params, arguments, named)
        except Exception as error:
            if self.rank is None:
                raise
            request = Request(problem=error)
        try:
            return self._controller.programs(request, goal)
        finally:
            del request

    def local(self, params: Any) -> Any:
        """`params` with None in place of the parts that belong to other processes."""
        if self.rank is None or self.definition.function:
            return params
        return keep(params, self.schedule.stages_of(self.rank))

    def readers(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The ranks that read a parameter, by stage and flat leaf, in any call so far.

        The leaves of one function's parameters are all counted as those of stage 0.
        """
        by_leaf: dict[tuple[int, int], tuple[int, ...]] = {}
        # Each ensemble has put the number of its members before them.
        before = len(self.definition.trainable.within)
        for (stage, leaf), ranks in self._controller.planner.readers().items():
            if leaf >= before:
                key = (0 if self.definition.function else stage, leaf - before)
                by_leaf[key] = tuple(sorted({*by_leaf.get(key, ()), *ranks}))
        return by_leaf

    def structure(self) -> optree.PyTreeSpec | None:
        """That of one function's parameters, if it is known: from when it was first traced."""
        spec = self._controller.planner.structure()
        if spec is None:
            return None
        if self.definition.has_state:
            spec = spec.children()[0]
        for place in self.definition.trainable.within:  # transforms put other things beside them
            spec = spec.children()[place]
        return spec

    # ── what all processes do together ──────────────────────────────────────────────────────────

    def add_up(self, make: Callable[[], Addend], *, deed: str, call: str) -> Marked:
        """The sum of a number over the processes, and whether any of them has marked its own.

        Args:
            make: returns the number of this process, and its mark.
            deed: what a process cannot do where `make` raises, in the error of the others.
            call: what the others are told that this process has called, where they call another.
        """
        return self._controller.add_up(call, deed, make)

    def each(
        self, deed: str, work: Callable[[], T], key: Tensor | None = None, call: str = PREPARES
    ) -> T:
        """Do what each process does by itself; where one of them cannot, none goes on.

        A process that did would wait for the others in what they do next together.

        Args:
            deed: what a process cannot do where it raises: "load its parameters".
            work: returns what is returned here. Errors are as for `add_up`.
            key: of what they draw, the same in all of them.
            call: as for `add_up`.
        """
        done: list[T] = []

        def number() -> Addend:
            done.append(work())
            alone = key is None or self.rank is None
            return Addend(0.0, key=None if alone else read_key(key, wanted=True))

        self._controller.add_up(call, deed, number)
        return done[0]

    def together(self, call: str, work: Callable[[Gather], T]) -> T:
        """Do what all processes do at once; a rank that is lost is known as in `step`.

        Args:
            call: one of `fpipe.execute.header.CALLS`.
            work: is given what takes a picklable value of each process and returns all of them.
                An exception within it breaks the connections of the group.
        """
        return self._controller.together(call, work)

    # ── one call ────────────────────────────────────────────────────────────────────────────────

    def _run(
        self,
        goal: Goal,
        arguments: Sequence[Any],
        key: Tensor | None,
        name: str | None = None,
        read: Callable[[], tuple[Sequence[Any], Move]] | None = None,
        scale: float = 1.0,
    ) -> RunResult:
        """Make a call for a goal; arguments are those of `run_step` and of `run_updating`."""
        recorded = torch.is_grad_enabled()
        around = PIPELINES_AROUND.set(PIPELINES_AROUND.get() + 1)
        request = Request()
        try:
            request = self._request(arguments, key, read)._replace(scale=scale)
            return self._controller.run(request, goal, name)
        finally:
            del request  # this frame is behind the traceback of its problem, and would keep itself
            PIPELINES_AROUND.reset(around)
            if torch.is_grad_enabled() != recorded:  # an interrupt has come within torch.no_grad
                torch.set_grad_enabled(recorded)

    def _request(
        self,
        arguments: Sequence[Any],
        key: Tensor | None,
        read: Callable[[], tuple[Sequence[Any], Move]] | None,
    ) -> Request:
        """The request of a call; if its arguments are wrong, the other processes are to know."""
        try:
            request = self.reader.request(arguments, key)
            if read is not None:
                request = request._replace(params=Updating(request.params, *read()))
            return request
        except Exception as error:
            if self.rank is None:
                raise
            return Request(problem=error)
