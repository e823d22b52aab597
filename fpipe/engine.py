"""The pipeline: what a user builds once and calls every step.

params, batch ── flatten, split ──► plan (cached per shapes) ──► slots ── programs ──► results
                                      │
                                      └ trace ─ partition ─ lower ─ compile, at the first call
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from fpipe import tree
from fpipe.checkpoint.loading import NO_NAMING, Naming, reading
from fpipe.controller.choosing import controller_of, workshop_of
from fpipe.controller.controller import Finished, Gather
from fpipe.convention import Convention
from fpipe.definition import Definition
from fpipe.errors import BatchError
from fpipe.history import has_history, is_tracked, tracked_value
from fpipe.holding import InitFn, Make, drawn, held, whole
from fpipe.levels import call_within, is_within
from fpipe.parameters import keep
from fpipe.plan import batch_gradients, collected, divided, gradients
from fpipe.results import ForwardAux, Step, StepAux, StepState, StepStateAux
from fpipe.runtime.connect import device_of
from fpipe.runtime.program import Program
from fpipe.schedule import Schedule
from fpipe.shapes import Goal
from fpipe.stage.workshop import Workshop

T = TypeVar("T")

OWN = object()
"""Stands for what the pipeline was made with."""


class Pipeline:
    """A pipeline-parallel step as a pure function; `fpipe.pipeline` makes one.

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
        self.definition = definition
        self.schedule = definition.schedule
        self.rank = None if definition.group is None else definition.group.rank()
        self.derived: dict[Any, Pipeline] = {}
        self.workshop = workshop or workshop_of(definition)
        self._controller = controller_of(definition, self.workshop)

    def __repr__(self) -> str:
        return f"<Pipeline of {self.schedule!r}>"

    def step(self, params: Any, *arguments: Any, key: Tensor | None = None) -> Any:
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
                still the mean over the batch. Over a process group every rank passes the batch; one
                whose stages do not read it may pass None. The state is a pytree of tensors too.
            key: a key of `fpipe.random`, if stages read one: microbatch `m` draws from
                ``fold_in(key, m)``, so the numbers depend neither on the schedule nor on ranks. The
                same on every rank. It may also come as the last of `arguments`.

        Returns:
            ``(loss, grads)``: the scalar loss in the dtype that the loss function returns, and the
            gradients in the structure, shapes and dtypes of `params`, detached (but within
            `torch.func`) and the caller's.
            With ``has_aux`` a `StepAux`, ``(loss, grads, aux)``; with ``has_state`` a `StepState`,
            ``(loss, grads, state)``; with both a `StepStateAux`, ``(loss, grads, state, aux)``.

        Raises:
            BatchError: `params` or `batch` has a wrong structure, or too few rows; or a key is
                missing, or given and not read.
            StageError: a stage cannot be traced on these shapes.
            PipelineError: an action failed; the pipeline can be used again. Over a process group
                whatever goes wrong on any rank is a PipelineError on every rank, whose cause on the
                rank at fault is the original error; it says whether the pipeline can be used again.
        """
        arguments, key = self._without_key(arguments, key)
        if is_within():
            return call_within(self, "step", params, *arguments, key=key)
        done = self._run((params, *arguments), "step", key)
        loss, grads = self._loss_of(done), self._grads_of(done)
        if self.definition.has_aux or self.definition.has_state:
            return self._with_more(loss, grads, done)
        return Step(loss, grads)

    def value(self, params: Any, *arguments: Any, key: Tensor | None = None) -> Tensor:
        """The loss of one batch alone: runs forward only and keeps nothing for a backward.

        Arguments, result and errors are those of `step`. Only where autograd is watching, that is
        where a leaf requires a gradient outside `torch.no_grad`, or within `torch.func.grad`, a
        whole step runs, and the loss has a history: ``backward()`` and `torch.func.grad` can
        differentiate it, by the parameters and, in one process, by leaves of the batch. There it
        can also be differentiated twice, and within `torch.func.jvp`, as it is by
        `torch.func.hessian`; each derivative is a call of a pipeline again. The losses of an
        ensemble or of single examples have a history too, by the parameters; the loss of a pipeline
        with a state has none. A new state is dropped.

        Raises:
            FpipeError: it is differentiated three times, by what it cannot be, or by another
                transform of `torch.func`; says what to use instead.
        """
        arguments, key = self._without_key(arguments, key)
        if is_within():
            return call_within(self, "value", params, *arguments, key=key)
        if has_history(self) and is_tracked(tree.flatten((params, arguments))[0]):
            return tracked_value(self, params, *arguments, key=key)
        loss: Tensor = self.run_value(params, *arguments, key=key)
        return loss

    def forward(
        self, params: Any, *arguments: Any, key: Tensor | None = None, out_dims: Any = OWN
    ) -> Any:
        """What comes out for the whole batch, by running forward only.

        Of stages that is the last one's output; the loss is not computed. Of one function it is its
        loss and, as a named tuple, the aux that it must declare with ``has_aux=True``; a new state
        is dropped.

        Args:
            params: as in `step`.
            arguments: as in `step`; leaves of the batch that only the loss reads may be missing.
            key: as in `step`.
            out_dims: pytree prefix of the output, or of aux: the dimension along which the leaves
                of the microbatches are concatenated (those without dimensions are stacked), or None
                to keep the last microbatch's leaf. By default the pipeline's own.

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
        arguments, key = self._without_key(arguments, key)
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
            moved.derived = {key: own.with_schedule(schedule) for key, own in self.derived.items()}
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

    def init(self, init_fn: InitFn, key: Tensor, *example: Any, shapes: Any = None) -> Any:
        """Make parameters; over a process group each process makes those of its own stages alone.

        What a leaf becomes depends on `key` and its name, and so neither on the schedule nor on the
        number of processes.

        Args:
            init_fn: ``(key, name, like) -> tensor``, called for each leaf: `key` is its own, `name`
                the keys and indices of its path joined by dots (for a module, as in
                ``named_parameters()``), `like` a meta tensor of the shape and dtype that it must
                return.
            key: a key of `fpipe.random`, the same on every rank.
            example: what `step` takes after the parameters, or meta tensors of those shapes. Over a
                process group a pipeline of one function, or of a module, is traced on them, to
                learn which leaves its stages read. Not needed where it has run before, or in one
                process, or for stages that are functions of their own.
            shapes: parameters as for `step`, of which shapes and dtypes count, such as those that
                were made under ``torch.device("meta")``. The pipeline of a module knows them.

        Returns:
            Parameters in the structure of `shapes`. Over a process group there is None in place of
            other processes' stages, and of one function a meta tensor for each leaf that this
            process does not read: `step` takes such parameters. They lie on the device of the
            process group or of each rank, if it has one, and else where `init_fn` made them.

        Raises:
            BatchError: `shapes` is no such tree, or `init_fn` returns something else.
            StageError: `shapes` or `example` is missing.
            PipelineError: over a process group, where all ranks must call this, another rank has
                failed.

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
            >>> stage, loss = (lambda w, x: x @ w), (lambda y, _: y.square().mean())
            >>> pipe = fpipe.pipeline([stage, stage], loss, schedule, compile=False)
            >>> shapes = [torch.empty(3, 3, device="meta")] * 2
            >>> normal = lambda key, name, like: fpipe.random.normal(key, like.shape, like.dtype)
            >>> params = pipe.init(normal, fpipe.random.key(0), shapes=shapes)
            >>> [tuple(leaf.shape) for leaf in params], torch.equal(*params)
            ([(3, 3), (3, 3)], False)
        """
        make, group = drawn(init_fn, key), self.definition.group
        home = None if group is None else device_of(group)
        likes, traced_on = self._shapes(shapes), self._traced_on(example)
        return held(self, lambda names: make, likes, traced_on, home=home)

    def load(
        self,
        path: str | PathLike[str],
        *example: Any,
        shapes: Any = None,
        rename: Callable[[str], str] | None = None,
        strict: bool = True,
    ) -> Any:
        """Read parameters from files; over a process group each process reads those that it needs.

        Args:
            path: a file of safetensors, a directory with such files and perhaps an index, as
                Hugging Face writes them, or a directory of ``torch.distributed.checkpoint``.
            example: as for `init`.
            shapes: as for `init`; tensors of other dtypes are converted.
            rename: from the name of a leaf (as for `init`) to that in the checkpoint.
            strict: refuse a checkpoint that has more than the parameters. Buffers of a module, and
                other names of tied parameters, are no more.

        Returns:
            As `init`, on the default device, that of each rank or that of the process group.

        Raises:
            BatchError: a parameter is missing or has another shape, or there are more; says which.
            StageError: as for `init`, as is PipelineError.
        """

        def reader(names: Sequence[str]) -> Make:
            return reading(path, names, self._naming(), rename, strict)

        likes, traced_on = self._shapes(shapes), self._traced_on(example)
        return held(self, reader, likes, traced_on, home=device_of(self.definition.group))

    def load_state(
        self,
        path: str | PathLike[str],
        *,
        shapes: Any = None,
        rename: Callable[[str], str] | None = None,
    ) -> Any:
        """Read a state from files, all of it on each process, as `step` returns it.

        Args:
            path: as for `load`, as is `rename`. What else is there is passed over.
            shapes: a state as for `step`, of which shapes and dtypes count. The pipeline of a
                module knows it.
            rename: from the name of a leaf to that in the checkpoint.

        Returns:
            The state in the structure of `shapes`, on the default device or that of the process
            group.

        Raises:
            BatchError: a leaf is missing or has another shape; says which.
            StageError: `shapes` is missing, or the pipeline has no state.
            PipelineError: over a process group, where all ranks must call this, another rank has
                failed.
        """

        def reader(names: Sequence[str]) -> Make:
            return reading(path, names, NO_NAMING, rename, strict=False)

        return whole(self, reader, shapes)

    def _shapes(self, shapes: Any) -> Any:
        """The shapes of the parameters."""
        return shapes

    def _naming(self) -> Naming:
        """What is known of names in a checkpoint."""
        return NO_NAMING

    def programs(self, params: Any, batch: Any, *vectors: Any) -> tuple[Program, ...]:
        """The program of each rank for a step on arguments of these shapes: to be printed and read.

        ``program.peak_bytes`` is what the rank will hold at most, beside parameters and batch.
        Tensors on the meta device will do; a step on real tensors of those shapes, which lie on the
        CPU or on the devices of the pipeline, then runs these programs.
        """
        return self._controller.programs(lambda: self._convention.enter(params, batch, *vectors))

    def add_up(self, value: float) -> float:
        """The sum of a number over the processes, the same in each: all of them must call it.

        Raises:
            PipelineError: over a process group, as in `step`.
        """
        return self._controller.add_up(value)

    def together(self, call: str, work: Callable[[Gather], T]) -> T:
        """Do what all processes do at once; a rank that is lost is known as in `step`.

        Args:
            call: one of `fpipe.controller.agreement.CALLS`.
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
        for (stage, leaf), ranks in self._controller.readers().items():
            if leaf >= before:
                key = (0 if self.definition.function else stage, leaf - before)
                found[key] = tuple(sorted({*found.get(key, ()), *ranks}))
        return found

    # ── for transforms, whose pipelines take vectors too and return other things ────────────────

    def run_step(self, *arguments: Any, key: Tensor | None = None) -> tuple[Any, ...]:
        """The loss and the gradients, as the convention returns them, and aux if there is any."""
        if is_within():
            return call_within(self, "run_step", *arguments, key=key)
        done = self._run(arguments, "step", key)
        found = self._loss_of(done), self._grads_of(done)
        if self.definition.has_aux:
            return *found, self._aux_of(done, self.definition.out_dims)
        return found

    def run_value(self, *arguments: Any, key: Tensor | None = None) -> Any:
        """The loss, as the convention returns it."""
        if is_within():
            return call_within(self, "run_value", *arguments, key=key)
        return self._loss_of(self._run(arguments, "value", key))

    def run_forward(self, *arguments: Any, key: Tensor | None = None, out_dims: Any = 0) -> Any:
        """The output of the last stage as it returns it, its microbatches merged."""
        if is_within():
            return call_within(self, "run_forward", *arguments, key=key, out_dims=out_dims)
        done = self._run(arguments, "forward", key)
        if self.definition.function:
            return ForwardAux(self._loss_of(done), self._aux_of(done, out_dims))
        if self.rank not in (None, done.plan.last_rank):
            return None
        return done.plan.outputs(done.runs, self._convention.out_dims(out_dims), "output")

    def _grads_of(self, done: Finished) -> Any:
        """The gradients, as the convention returns them."""
        if self.definition.argnums != "params":
            return self._chosen_grads(done)
        if self.definition.sink.everywhere:
            assert done.total is not None
            parts = list(collected(done.plan, done.runs).values())
            return divided(self._convention.grads(parts), done.total.weight).abs()
        return self._convention.grads(tree.unflatten(done.params.spec, self._flat_grads(done)))

    def _flat_grads(self, done: Finished) -> list[Tensor | None]:
        assert done.total is not None
        return gradients(done.plan, done.runs, done.params, done.total.weight)

    def _with_more(self, loss: Any, grads: Any, done: Finished) -> Any:
        """The result of a step that returns state or aux."""
        aux = None
        if self.definition.has_aux:
            aux = self._aux_of(done, self.definition.out_dims)
        if not self.definition.has_state:
            return StepAux(loss, grads, aux)
        leaves = done.plan.state(done.runs, done.params, done.batch)
        with torch.no_grad():
            state = self._convention.state(tree.unflatten(done.params.spec.children()[1], leaves))
        if self.definition.has_aux:
            return StepStateAux(loss, grads, state, aux)
        return StepState(loss, grads, state)

    def _aux_of(self, done: Finished, out_dims: Any) -> Any:
        return done.plan.outputs(done.runs, self._convention.aux_dims(out_dims), "aux")

    def _chosen_grads(self, done: Finished) -> Any:
        """Gradients by what was chosen, one or a tuple."""
        found: list[Any] = []
        for argument in self.definition.wanted:
            if argument == "params":
                flat = self._flat_grads(done)
                found.append(self._convention.grads(tree.unflatten(done.params.spec, flat)))
            elif self.rank in (None, self.schedule.placement[0]):
                assert done.total is not None
                weight, in_dims = done.total.weight, self.definition.in_dims
                grads = batch_gradients(done.runs, done.batch, in_dims, weight)
                found.append(self._convention.batch(grads))
            else:
                found.append(None)
        return found[0] if isinstance(self.definition.argnums, str) else tuple(found)

    @property
    def _convention(self) -> Convention:
        return self.definition.convention

    def _loss_of(self, done: Finished) -> Any:
        assert done.total is not None
        return self._convention.loss(done.total.mean)

    def _without_key(
        self, arguments: tuple[Any, ...], key: Tensor | None
    ) -> tuple[tuple[Any, ...], Tensor | None]:
        """Take the key from the end of the arguments after params, if it came there."""
        if key is None and len(arguments) == len(self.definition.takes):
            return arguments[:-1], arguments[-1]
        return arguments, key

    def _traced_on(self, example: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a trace takes of what `step` takes: all but the key."""
        keyed = self.definition.reads_key and not self._convention.vectors
        return self._without_key(example, None)[0] if keyed else example

    def _run(self, arguments: Sequence[Any], goal: Goal, key: Tensor | None) -> Finished:
        def enter() -> tuple[Any, Any]:
            if len(arguments) != len(self.definition.takes):
                raise _miscounted(arguments, self.definition.takes)
            return self._convention.enter(*arguments)

        return self._controller.run(enter, goal, key)


def _miscounted(arguments: Sequence[Any], takes: Sequence[str]) -> BatchError:
    return BatchError(
        f"the pipeline got {len(arguments)} arguments, but takes {len(takes)}: {', '.join(takes)}"
    )
