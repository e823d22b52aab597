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
from functools import partial
from typing import Any, NoReturn, TypeVar

import optree
import torch
from torch import Tensor

from fpipe import pytree
from fpipe.autograd.history import (
    NO_LOSS,
    has_history,
    is_tracked,
    tracked_forward,
    tracked_value,
    without_history,
)
from fpipe.autograd.levels import call_within, is_within
from fpipe.convention import DEFERRED, PLAIN, STATE
from fpipe.definition import ONE_BATCH, Definition
from fpipe.dtensors import refuse_transformed
from fpipe.errors import BatchError, FpipeError
from fpipe.execute.choosing import controller_of, workshop_of
from fpipe.execute.controller import Enter, Gather
from fpipe.execute.header import CLIPS, PREPARES, TRAINS, Addend, Marked
from fpipe.execute.keys import read_key
from fpipe.inputs.caller_modes import refuse_modes
from fpipe.inputs.params import Move, Updating, keep
from fpipe.inputs.signature import Goal
from fpipe.outcome import Outcome
from fpipe.plan.workshop import Workshop
from fpipe.program.program import Program
from fpipe.random.key_tensors import check_key
from fpipe.random.keyed_mode import within_pipeline
from fpipe.results import ForwardAux
from fpipe.trace.isolation import refuse_within

T = TypeVar("T")

OWN = object()
"""Stands for what the pipeline was made with."""


class Engine:
    """Runs the calls of a pipeline.

    Args:
        definition: all that the pipeline is made from.
        workshop: traces and compiles the stages; None for one of its own.

    Attributes:
        definition: all that the pipeline is made from.
        schedule: what it runs.
        rank: the rank that this process drives; None if it drives all of them.
        derived: the engines that calls of this one within autograd and `torch.func` need.
        workshop: traces and compiles the stages, and keeps them.
    """

    def __init__(self, definition: Definition, workshop: Workshop | None = None) -> None:
        self.definition = definition
        self.schedule = definition.schedule
        self.rank = None if definition.group is None else definition.group.rank()
        self.derived: dict[Any, Engine] = {}
        self.workshop = workshop or workshop_of(definition)
        self._controller = controller_of(definition, self.workshop)

    def under(self, definition: Definition) -> Engine:
        """The engine of a definition that differs in its schedule alone.

        It shares traces and kernels with this one, unless stages move to other devices.
        """
        shares = (
            definition.schedule.num_stages == self.schedule.num_stages
            and definition.stage_devices == self.definition.stage_devices
        )
        engine = Engine(definition, workshop=self.workshop if shares else None)
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
        """The arguments after params in order, and the key."""
        refuse_within()
        return self.told(goal, lambda: self.definition.in_order(arguments, key, named))

    def step(self, params: Any, *arguments: Any, key: Tensor | None = None) -> Any:
        """What `Pipeline.step` returns."""
        if is_within():
            return call_within(self, "step", params, *arguments, key=key)
        return self._run(self._entering(params, *arguments), "step", key).step()

    def value(self, params: Any, *arguments: Any, key: Tensor | None = None) -> Any:
        """What `Pipeline.value` returns."""
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
        """What `Pipeline.forward` returns."""
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
        outcome = self._run(self._entering(*arguments), "step", key, name)
        found = outcome.loss, outcome.take_grads()
        if self.definition.has_aux:
            return *found, outcome.aux(self.definition.out_dims)
        return found

    def run_updating(
        self,
        read: Callable[[], tuple[Sequence[Any], Move]],
        params: Any,
        *arguments: Any,
        key: Tensor | None = None,
        clips: bool,
        **named: Any,
    ) -> Outcome:
        """A step in which each stage is updated where the schedule says so.

        Args:
            read: returns the optimizer's state of each leaf of the parameters, in order, and its
                step of one leaf; may refuse them.
            params: as in `step`.
            arguments: as in `step`.
            key: as in `step`.
            clips: keep the gradients, and find their norm.
            named: as in `step`.
        """
        given, key = self.in_order("step", arguments, key, named)

        def enter() -> tuple[Any, Any]:
            stage_params, batch = self._enter((params, *given))
            return Updating(stage_params, *read()), batch

        return self._run(enter, "clip" if clips else "update", key, CLIPS if clips else TRAINS)

    def run_value(self, *arguments: Any, key: Tensor | None = None) -> Any:
        """The loss, as the convention returns it."""
        if is_within():
            return call_within(self, "run_value", *arguments, key=key)
        return self._run(self._entering(*arguments), "value", key).loss

    def run_forward(self, *arguments: Any, key: Tensor | None = None, out_dims: Any = 0) -> Any:
        """The output of the last stage as it returns it, its microbatches merged."""
        if is_within():
            return call_within(self, "run_forward", *arguments, key=key, out_dims=out_dims)
        outcome = self._run(self._entering(*arguments), "forward", key)
        if self.definition.function:
            return ForwardAux(outcome.loss, outcome.aux(out_dims))
        return outcome.output(out_dims)

    def told(self, goal: Goal, read: Callable[[], T]) -> T:
        """What `read` makes of a call's arguments; if they are wrong, all ranks know.

        Raises:
            BatchError: in one process, as `read` raises it.
            PipelineError: over a process group, where it does, on every rank.
        """
        try:
            return read()
        except FpipeError:
            if self.rank is None:
                raise

        def enter() -> NoReturn:
            read()
            raise AssertionError("arguments were wrong, and then right")

        self._controller.run(enter, goal)
        raise AssertionError("a call with wrong arguments has run")

    def telling(self, method: str) -> AbstractContextManager[None]:
        """Within it a method is called; where it is refused, other processes are told, later."""
        goal: Goal = "step"
        for other in ("value", "forward"):
            goal = other if method.endswith(other) else goal
        return self._controller.telling(goal)

    # ── what is known of stages and parameters ──────────────────────────────────────────────────

    def programs(
        self, goal: Goal, params: Any, *arguments: Any, key: Tensor | None = None, **named: Any
    ) -> tuple[Program, ...]:
        """The programs for arguments of these shapes, of a step or of one with an optimizer."""

        def enter() -> tuple[Any, Any]:
            given, last = self.definition.in_order(arguments, None, named)
            if last is not None and not self.definition.reads_key:
                raise _miscounted((params, *arguments), self.definition.takes)
            if last is not None:
                check_key(last)
            return self._enter((params, *given))

        return self._controller.programs(enter, goal)

    def local(self, params: Any) -> Any:
        """`params` with None in place of the parts that belong to other processes."""
        if self.rank is None or self.definition.function:
            return params
        return keep(params, self.schedule.stages_of(self.rank))

    def readers(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The ranks that read a parameter, by stage and flat leaf, in any call so far.

        The leaves of one function's parameters are all counted as those of stage 0.
        """
        found: dict[tuple[int, int], tuple[int, ...]] = {}
        # Each ensemble has put the number of its members before them.
        before = len(self.definition.trainable.within)
        for (stage, leaf), ranks in self._controller.planner.readers().items():
            if leaf >= before:
                key = (0 if self.definition.function else stage, leaf - before)
                found[key] = tuple(sorted({*found.get(key, ()), *ranks}))
        return found

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

    def each(self, deed: str, work: Callable[[], T], key: Tensor | None = None) -> T:
        """Do what each process does by itself; where one of them cannot, none goes on.

        A process that did would wait for the others in what they do next together.

        Args:
            deed: what a process cannot do where it raises: "load its parameters".
            work: returns what is returned here. Errors are as for `add_up`.
            key: of what they draw, the same in all of them.
        """
        done: list[T] = []

        def number() -> Addend:
            done.append(work())
            alone = key is None or self.rank is None
            return Addend(0.0, key=None if alone else read_key(key, wanted=True))

        self._controller.add_up(PREPARES, deed, number)
        return done[0]

    def together(self, call: str, work: Callable[[Gather], T]) -> T:
        """Do what all processes do at once; a rank that is lost is known as in `step`.

        Args:
            call: one of `fpipe.execute.header.CALLS`.
            work: is given what takes a picklable value of each process and returns all of them.
                What it raises breaks the connections of the group.
        """
        return self._controller.together(call, work)

    # ── one call ────────────────────────────────────────────────────────────────────────────────

    def _entering(self, *arguments: Any) -> Enter:
        return partial(self._enter, arguments)

    def _run(
        self, enter: Enter, goal: Goal, key: Tensor | None, name: str | None = None
    ) -> Outcome:
        recorded = torch.is_grad_enabled()
        try:
            with within_pipeline():
                done = self._controller.run(enter, goal, key, name)
        finally:
            if torch.is_grad_enabled() != recorded:  # an interrupt has come within torch.no_grad
                torch.set_grad_enabled(recorded)
        return Outcome(self.definition, self.rank, done)

    def _enter(self, arguments: Sequence[Any]) -> tuple[Any, Any]:
        """Parameters and batch, as stages take them."""
        definition = self.definition
        refuse_modes(compiled=definition.compile is not False)
        if len(arguments) != len(definition.takes):
            raise _miscounted(arguments, definition.takes)
        if (
            self.rank == self.schedule.placement[0]
            and "batch" in definition.wanted
            and not definition.sink.everywhere
            and arguments[definition.takes.index("batch")] is None
        ):
            raise BatchError(
                "batch=None on the rank of the first stage, which gets the gradients by the batch: "
                "pass it there, of which leaves that others read may lie on the meta device"
            )
        if definition.convention not in (PLAIN, STATE, DEFERRED):
            refuse_transformed(arguments, "a transform of fpipe, such as fpipe.vmap and fpipe.hvp")
        return definition.convention.enter(*arguments)


def _miscounted(arguments: Sequence[Any], takes: Sequence[str]) -> BatchError:
    more = f"; {ONE_BATCH}" if len(arguments) > len(takes) else ""
    return BatchError(
        f"the pipeline got {len(arguments)} arguments, but takes {len(takes)}: "
        f"{', '.join(takes)}{more}"
    )
