"""The pipeline: what a user builds once and calls every step.

params, batch ── flatten, split ──► plan (cached per shapes) ──► slots ── programs ──► results
                                      │
                                      └ trace ─ partition ─ lower ─ compile, at the first call
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Self, TypeVar

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
from fpipe.errors import BatchError, FpipeError, StageError, a_type
from fpipe.execute.choosing import controller_of, workshop_of
from fpipe.execute.controller import Enter, Gather
from fpipe.execute.header import CLIPS, PREPARES, TRAINS, Addend, Marked
from fpipe.execute.keys import read_key
from fpipe.inputs.caller_modes import refuse_modes
from fpipe.inputs.params import Move, Updating, keep
from fpipe.inputs.signature import Goal
from fpipe.loadable import Loadable
from fpipe.outcome import Outcome
from fpipe.plan.workshop import Workshop
from fpipe.program.program import Program
from fpipe.random.key_tensors import check_key
from fpipe.random.keyed_mode import within_pipeline
from fpipe.results import ForwardAux
from fpipe.schedule import Schedule
from fpipe.trace.isolation import refuse_within

T = TypeVar("T")

OWN = object()
"""Stands for what the pipeline was made with."""


class Pipeline(Loadable):
    """A pipeline-parallel step as a pure function: what `fpipe.pipeline` and its like return.

    It is not called directly: make one with `fpipe.pipeline` or `fpipe.from_module`.
    In one process several threads may call it at one time; over a group, one call runs at a time.

    Args:
        definition: all that it is made from.
        workshop: of a pipeline that differs in its schedule alone, whose traces and kernels serve
            this one too; None for one of its own.

    Attributes:
        definition: all that it was made from.
        schedule: what it runs.
        rank: the rank that this process drives; None if it drives all of them.
        derived: pipelines that calls of this one within autograd and `torch.func` have made.
        workshop: what traces and compiles the stages, and keeps them.
    """

    def __init__(self, definition: Definition, workshop: Workshop | None = None) -> None:
        if not isinstance(definition, Definition):
            raise StageError(
                f"fpipe.Pipeline({definition!r:.60}) is not called directly: "
                "fpipe.pipeline(stages, loss, schedule) makes one"
            )
        self.definition = definition
        self.schedule = definition.schedule
        self.rank = None if definition.group is None else definition.group.rank()
        self.derived: dict[Any, Pipeline] = {}
        self.workshop = workshop or workshop_of(definition)
        self._controller = controller_of(definition, self.workshop)

    def __dir__(self) -> list[str]:
        """What is for its users; the rest is for other parts of fpipe."""
        return [name for name in super().__dir__() if name not in _INTERNAL]

    def __repr__(self) -> str:
        return f"<Pipeline of {self.schedule!r}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise FpipeError(
            f"{self!r} cannot be copied or pickled, for its code and connections are this "
            "process's: make another of the same functions and schedule where it is needed, and "
            "keep it out of objects that are copied, such as modules"
        )

    def step(self, params: Any, *arguments: Any, key: Tensor | None = None, **named: Any) -> Any:
        """Loss and gradients of one batch.

        The first call for each set of shapes traces and compiles, and says so and why to the logger
        ``fpipe`` at level INFO. Nothing that is passed in is changed. Within `torch.func.grad` and
        `torch.func.jvp`, in one process, loss and gradients can be differentiated once more.

        Args:
            params: sequence with one pytree of tensors per stage; over a process group only those
                of the own stages are read.
            arguments: the batch, after the state where ``has_state`` declares one. The batch is a
                pytree of tensors, split into microbatches by the pipeline's ``in_dims``. When
                its rows do not divide evenly, microbatches differ by one row, and the loss is
                still the mean over the batch. `fpipe.Microbatches` are split already. Over a
                process group every rank passes the batch; one whose stages do not read it may pass
                None. The state is a pytree of tensors too.
            key: a key of `fpipe.random`, if stages read one: microbatch `m` draws from
                ``fold_in(key, m)``, so the numbers depend neither on the schedule nor on ranks. The
                same on every rank. It may also come as the last of `arguments`.
            named: the batch and the state may come by name, as ``batch`` and ``state``.

        Returns:
            ``(loss, grads)``: the scalar loss in the dtype that the loss function returns, and the
            gradients in the structure, shapes and dtypes of `params`, detached (but within
            `torch.func`) and the caller's.
            With ``has_aux`` a `StepAux`, ``(loss, grads, aux)``; with ``has_state`` a `StepState`,
            ``(loss, grads, state)``; with both a `StepStateAux`, ``(loss, grads, state, aux)``.

        Raises:
            BatchError: `params` or `batch` has a wrong structure, or too few rows; or a key is
                missing, or given and not read; or an argument is missing, or given twice.
            StageError: a stage cannot be traced on these shapes.
            ScheduleError: the schedule leaves out gradients that a stage has.
            PipelineError: an action failed; the pipeline can be used again. Over a process group
                whatever goes wrong on any rank is a PipelineError on every rank, whose cause on the
                rank at fault is the original error; it says whether the pipeline can be used again.
        """
        arguments, key = self._in_order("step", arguments, key, named)
        if is_within():
            return call_within(self, "step", params, *arguments, key=key)
        return self._run(self._entering(params, *arguments), "step", key).step()

    def value(
        self, params: Any, *arguments: Any, key: Tensor | None = None, **named: Any
    ) -> Tensor:
        """The loss of one batch alone: runs forward only and keeps nothing for a backward.

        Arguments, result and errors are those of `step`. Only where autograd is watching, that is
        where a leaf requires a gradient outside `torch.no_grad`, or within `torch.func.grad`, a
        whole step runs, and the loss has a history: ``backward()`` and `torch.func.grad` can
        differentiate it, by the parameters and, in one process, by leaves of the batch. There it
        can also be differentiated twice, and within `torch.func.jvp`, as it is by
        `torch.func.hessian`; each derivative is a call of a pipeline again. The losses of an
        ensemble have a history too, and those of single examples by the parameters; a backward of
        the loss of a pipeline with a state is refused. A new state is dropped.

        Raises:
            FpipeError: it is differentiated three times, by what it cannot be, or by another
                transform of `torch.func`; says what to use instead.
        """
        arguments, key = self._in_order("value", arguments, key, named)
        if is_within():
            return call_within(self, "value", params, *arguments, key=key)
        leaves = pytree.flatten((params, arguments))[0]
        tracked = is_tracked(leaves)
        if tracked and has_history(self):
            return tracked_value(self, params, *arguments, key=key)
        loss: Tensor = self.run_value(params, *arguments, key=key)
        if tracked:
            loss = without_history(loss, leaves, NO_LOSS)
        return loss

    def forward(
        self,
        params: Any,
        *arguments: Any,
        key: Tensor | None = None,
        out_dims: Any = OWN,
        **named: Any,
    ) -> Any:
        """What comes out for the whole batch, by running forward only.

        Of stages that is the last one's output; the loss is not computed. Of one function it is its
        loss and, as a named tuple, the aux that it must declare with ``has_aux=True``; a new state
        is dropped.

        Where autograd is watching, in one process, what comes out has a history, so a loss of all
        rows at once can be made of it, whose backward runs the pipeline once more, as `fpipe.vjp`
        does, and refuses to go on if other numbers come out. Otherwise a backward says what to use.
        Within `torch.no_grad` there is none.

        Args:
            params: as in `step`.
            arguments: as in `step`; leaves of the batch that only the loss reads may be missing.
            key: as in `step`.
            named: as in `step`.
            out_dims: pytree prefix of the output, or of aux: the dimension along which the leaves
                of the microbatches are concatenated (those without dimensions are stacked), None to
                keep the last microbatch's leaf, or `fpipe.Microbatches` to leave them apart. By
                default the pipeline's own.

        Returns:
            The output pytree, in the order of the rows of the batch. Over a process group it is
            returned on the rank of the last stage, and None on the others. Of one function
            `ForwardAux`, ``(loss, aux)``.

        Raises:
            BatchError: as in `step`, or an output leaf cannot be concatenated.
            StageError: as in `step`, or one function declares no aux.
        """
        if out_dims is OWN:
            out_dims = self.definition.out_dims
        arguments, key = self._in_order("forward", arguments, key, named)
        if is_within():
            options = {"key": key, "out_dims": out_dims}
            return call_within(self, "forward", params, *arguments, **options)
        if is_tracked(pytree.flatten((params, arguments))[0]):
            return tracked_forward(self, params, *arguments, key=key, out_dims=out_dims)
        return self.run_forward(params, *arguments, key=key, out_dims=out_dims)

    def with_schedule(self, schedule: Schedule) -> Self:
        """The same stages, loss and options under another schedule.

        What this pipeline has traced and compiled serves the new one too, and the other way round,
        so many schedules of one model cost little more than one. Only if a stage moves to another
        one of the `devices` is all made anew.

        Args:
            schedule: with as many stages.

        Raises:
            ScheduleError: the schedule cannot run.
            StageError: it has another number of stages, or of ranks than the process group.
        """
        definition = replace(self.definition, schedule=schedule)
        shares = (
            schedule.num_stages == self.schedule.num_stages
            and definition.stage_devices == self.definition.stage_devices
        )
        moved = type(self)(definition, workshop=self.workshop if shares else None)
        if shares:
            derived = list(self.derived.items())  # to which another thread may add
            moved.derived = {key: own.with_schedule(schedule) for key, own in derived}
        return moved

    def local(self, params: Any) -> Any:
        """`params` with None in place of the parts that belong to other processes.

        Args:
            params: sequence with one entry per stage, of any kind: parameters, optimizers, names.
                The parameters of one function, which has no parts, are returned whole.
        """
        if self.rank is None or self.definition.function:
            return params
        return keep(params, self.schedule.stages_of(self.rank))

    def programs(
        self, params: Any, *arguments: Any, key: Tensor | None = None, **named: Any
    ) -> tuple[Program, ...]:
        """The program of each rank for a step on arguments of these shapes: to be printed and read.

        ``program.peak_bytes`` is what the rank will hold at most, beside parameters and batch.
        Tensors on the meta device will do; a step on real tensors of those shapes, which lie on the
        CPU or on the devices of the pipeline, then runs these programs. They depend on no key:
        it may be left out.
        """
        return self.programs_for("step", params, *arguments, key=key, **named)

    def programs_for(
        self, goal: Goal, params: Any, *arguments: Any, key: Tensor | None = None, **named: Any
    ) -> tuple[Program, ...]:
        """`programs` of a step, or of one with an optimizer."""

        def enter() -> tuple[Any, Any]:
            given, last = self.definition.in_order(arguments, None, named)
            if last is not None and not self.definition.reads_key:
                raise _miscounted((params, *arguments), self.definition.takes)
            if last is not None:
                check_key(last)
            return self._enter((params, *given))

        return self._controller.programs(enter, goal)

    def add_up(
        self,
        value: float | Callable[[], float],
        *,
        deed: str = "add up its number",
        call: str = "pipe.add_up",
    ) -> float:
        """The sum of a number over the processes, the same in each: all of them must call it.

        Args:
            value: the number of this process, or what returns it. Where that raises, this does.
            deed: what a process cannot do then, in the error of the others.
            call: what the others are told that this process has called, where they call another.

        Raises:
            PipelineError: over a process group, as in `step`, and where another rank has raised.
        """
        make = value if callable(value) else lambda: value
        return self.add_up_marked(lambda: Addend(make()), deed=deed, call=call)[0]

    def add_up_marked(self, make: Callable[[], Addend], *, deed: str, call: str) -> Marked:
        """The sum of a number over the processes, and whether any of them has marked its own.

        Args:
            make: returns the number of this process, and its mark; others are as for `add_up`.
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

    def telling(self, method: str) -> AbstractContextManager[None]:
        """Within it a method is called; where it is refused, other processes are told, later."""
        goal: Goal = "step"
        for other in ("value", "forward"):
            goal = other if method.endswith(other) else goal
        return self._controller.telling(goal)

    # ── for transforms, whose pipelines take vectors too and return other things ────────────────

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
        given, key = self._in_order("step", arguments, key, named)

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

    def _in_order(
        self, goal: Goal, arguments: tuple[Any, ...], key: Tensor | None, named: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Tensor | None]:
        """The arguments after params in order, and the key."""
        refuse_within()
        return self.told(goal, lambda: self.definition.in_order(arguments, key, named))

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


_INTERNAL = frozenset(
    {
        "add_up_marked",
        "definition",
        "derived",
        "each",
        "programs_for",
        "readers",
        "run_forward",
        "run_step",
        "run_updating",
        "run_value",
        "structure",
        "telling",
        "together",
        "told",
        "workshop",
    }
)
"""Names of a `Pipeline` that are not for its users."""


def _miscounted(arguments: Sequence[Any], takes: Sequence[str]) -> BatchError:
    more = f"; {ONE_BATCH}" if len(arguments) > len(takes) else ""
    return BatchError(
        f"the pipeline got {len(arguments)} arguments, but takes {len(takes)}: "
        f"{', '.join(takes)}{more}"
    )


def check_is_pipeline(argument: str, value: object, function: str) -> None:
    """Refuse what is no pipeline.

    Raises:
        FpipeError: names the argument, and the function that takes it.
    """
    if not isinstance(value, Pipeline):
        raise FpipeError(
            f"{argument}={value!r:.60} is {a_type(value)}: fpipe.pipeline(...) makes what "
            f"{function} takes"
        )
