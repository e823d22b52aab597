"""The pipeline: what a user builds once and calls every step.

params, batch ── flatten, split ──► plan (cached per shapes) ──► slots ── programs ──► results
                                      │
                                      └ trace ─ partition ─ lower ─ compile, at the first call
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fpipe import tree
from fpipe.checkpoint.loading import NO_NAMING, Naming, reading
from fpipe.controller.controller import Controller, Finished
from fpipe.controller.keys import read_key
from fpipe.controller.multi import MultiController
from fpipe.controller.single import SingleController
from fpipe.convention import Convention, called
from fpipe.definition import Definition, group_of, placed, stages_of, whole_loss
from fpipe.errors import BatchError, StageError
from fpipe.history import has_history, is_tracked, tracked_value
from fpipe.holding import InitFn, Make, drawn, held
from fpipe.levels import call_within, is_within
from fpipe.parameters import Parameters, keep
from fpipe.plan import Planner, batch_gradients, collected, gradients
from fpipe.results import ForwardAux, Step, StepAux, StepState, StepStateAux
from fpipe.runtime.connect import device_of
from fpipe.runtime.lower import lower
from fpipe.runtime.order import lower_for_group
from fpipe.runtime.program import Program
from fpipe.schedule import Schedule
from fpipe.shapes import Goal
from fpipe.stage.chain import ChainTracer
from fpipe.stage.compiler import Compile, Compiler
from fpipe.stage.function import FunctionTracer
from fpipe.stage.remat import Remat, policies
from fpipe.stage.stage import Stage
from fpipe.stage.trainable import Trainable

OWN = object()
"""Stands for what the pipeline was made with."""


class Pipeline:
    """A pipeline-parallel step as a pure function; `fpipe.pipeline` makes one.

    Attributes:
        definition: all that it was made from.
        schedule: what it runs.
        rank: the rank that this process drives; None if it drives all of them.
        derived: pipelines that calls of this one within autograd and `torch.func` have made.
    """

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.schedule = definition.schedule
        self.rank = None if definition.group is None else definition.group.rank()
        self.derived: dict[Any, Pipeline] = {}
        self._controller = _controller(definition)

    def __repr__(self) -> str:
        return f"<Pipeline of {self.schedule!r}>"

    def step(self, params: Any, *arguments: Any, key: Tensor | None = None) -> Any:
        """Loss and gradients of one batch.

        The first call for each set of shapes traces and compiles, and says so and why to the logger
        ``fpipe`` at level INFO. Nothing that is passed in is changed.

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
            gradients in the structure, shapes and dtypes of `params`, detached and the caller's.
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
        differentiate it once, by the parameters and, in one process, by leaves of the batch. The
        losses of an ensemble or of single examples have one too, by the parameters; the loss of a
        pipeline with a state has none. A new state is dropped.

        Raises:
            FpipeError: it is differentiated twice, by what it cannot be, or by another transform
                of `torch.func`; says what to use instead.
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

        Args:
            schedule: with as many stages.

        Raises:
            ScheduleError: the schedule cannot run.
            StageError: it has another number of stages, or of ranks than the process group.
        """
        return type(self)(replace(self.definition, schedule=schedule))

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
            process does not read: `step` takes such parameters.

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
        make = drawn(init_fn, key)
        return held(self, lambda names: make, self._shapes(shapes), example)

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
            As `init`, on the CPU or the device of the process group.

        Raises:
            BatchError: a parameter is missing or has another shape, or there are more; says which.
            StageError: as for `init`, as is PipelineError.
        """

        def reader(names: Sequence[str]) -> Make:
            return reading(path, names, self._naming(), rename, strict)

        return held(self, reader, self._shapes(shapes), example)

    def _shapes(self, shapes: Any) -> Any:
        """The shapes of the parameters."""
        if shapes is None:
            raise StageError(
                "shapes is missing: pass parameters as for step, of which only shapes and dtypes "
                "count, such as those that are made under torch.device('meta')"
            )
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
        return self._controller.programs(*self._convention.enter(params, batch, *vectors))

    def add_up(self, value: float) -> float:
        """The sum of a number over the processes, the same in each: all of them must call it.

        Raises:
            PipelineError: over a process group, as in `step`.
        """
        return self._controller.add_up(value)

    def readers(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The ranks that read a parameter, by stage and flat leaf, in any call so far.

        The leaves of one function's parameters are all counted as those of stage 0.
        """
        found: dict[tuple[int, int], tuple[int, ...]] = {}
        for (stage, leaf), ranks in self._controller.readers().items():
            key = (0 if self.definition.function else stage, leaf)
            found[key] = tuple(sorted({*found.get(key, ()), *ranks}))
        return found

    # ── for transforms, whose pipelines take vectors too and return other things ────────────────

    def run_step(self, *arguments: Any, key: Tensor | None = None) -> tuple[Any, Any]:
        """The loss and the gradients, as the convention returns them."""
        if is_within():
            return call_within(self, "run_step", *arguments, key=key)
        done = self._run(arguments, "step", key)
        return self._loss_of(done), self._grads_of(done)

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
            return ForwardAux(self._loss_of(done), done.plan.outputs(done.runs, out_dims, "aux"))
        if self.rank not in (None, done.plan.last_rank):
            return None
        return done.plan.outputs(done.runs, self._convention.out_dims(out_dims), "output")

    def _grads_of(self, done: Finished) -> Any:
        """The gradients, as the convention returns them."""
        if self.definition.argnums != "params":
            return self._chosen_grads(done)
        grads: Any
        if self.definition.sink.everywhere:
            grads = list(collected(done.plan, done.runs).values())
        else:
            grads = tree.unflatten(done.params.spec, self._flat_grads(done))
        return self._convention.grads(grads)

    def _flat_grads(self, done: Finished) -> list[Tensor | None]:
        assert done.total is not None
        return gradients(done.plan, done.runs, done.params, done.total.weight)

    def _with_more(self, loss: Any, grads: Any, done: Finished) -> Any:
        """The result of a step that returns state or aux."""
        aux = None
        if self.definition.has_aux:
            aux = done.plan.outputs(done.runs, self.definition.out_dims, "aux")
        if not self.definition.has_state:
            return StepAux(loss, grads, aux)
        leaves = done.plan.state(done.runs, done.params)
        with torch.no_grad():
            state = self._convention.state(tree.unflatten(done.params.spec.children()[1], leaves))
        if self.definition.has_aux:
            return StepStateAux(loss, grads, state, aux)
        return StepState(loss, grads, state)

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
        if key is None and len(arguments) == 2 + self.definition.has_state:
            return arguments[:-1], arguments[-1]
        return arguments, key

    def _run(self, arguments: Sequence[Any], goal: Goal, key: Tensor | None) -> Finished:
        if len(arguments) != 2 + self.definition.has_state + self._convention.vectors:
            raise _miscounted(arguments, self.definition)
        params, batch = self._convention.enter(*arguments)
        return self._controller.run(params, batch, goal, key)._replace(batch=batch)


def _miscounted(arguments: Sequence[Any], definition: Definition) -> BatchError:
    names = ["params", *["state"] * definition.has_state, "batch"]
    names += ["vector"] * definition.convention.vectors
    return BatchError(
        f"the pipeline got {len(arguments)} arguments, but takes {len(names)}: {', '.join(names)}"
    )


def _controller(definition: Definition) -> Controller:
    """Who drives the ranks of this process."""
    schedule, devices, group = definition.schedule, definition.devices, definition.group
    planner = Planner(
        tracer=_tracer(definition),
        compiler=Compiler(definition.compile),
        schedule=schedule,
        policies=policies(definition.remat),
        mean=definition.reduction == "mean",
        cotangent=definition.loss_cotangent,
        lower=partial(
            lower if group is None else partial(lower_for_group, rank=group.rank()),
            tied=definition.function,
            everywhere=definition.sink.everywhere,
        ),
        sink=definition.sink,
    )

    def read(params: Any) -> Parameters:
        if definition.has_state:
            return Parameters.with_state(params, schedule.num_stages)
        if definition.function:
            return Parameters.whole(params, schedule.num_stages)
        if group is not None:
            # Parts of other ranks' stages are neither looked at nor kept.
            params = keep(params, schedule.stages_of(group.rank()))
        return Parameters.read(params, schedule.num_stages)

    key = partial(read_key, wanted=definition.reads_key)
    if group is None:
        return SingleController(
            planner, read, definition.in_dims, schedule.num_microbatches, devices, key
        )
    return MultiController(
        planner,
        read,
        schedule,
        definition.in_dims,
        group,
        device_of(group),
        definition.timeout,
        definition.setup,
        key,
    )


def _tracer(definition: Definition) -> ChainTracer | FunctionTracer:
    """What turns the user's functions into a chain of graphs."""
    schedule, devices = definition.schedule, definition.devices
    if definition.function:
        return FunctionTracer(
            definition.loss,
            schedule.num_stages,
            definition.accum_dtype,
            definition.returns,
            definition.has_key,
            definition.trainable,
            keyed=definition.keyed,
        )
    return ChainTracer(
        definition.stages,
        definition.loss,
        definition.loss_shape,
        definition.accum_dtype,
        None if devices is None else [devices[rank] for rank in schedule.placement],
        definition.sink,
        definition.wanted,
        definition.returns,
        definition.trainable,
    )


def pipeline(
    stages: Sequence[Callable[..., Any] | Stage] | Callable[..., Any],
    loss: Callable[[Any, Any], Any] | None = None,
    schedule: Schedule | None = None,
    *,
    in_dims: Any = 0,
    out_dims: Any = 0,
    has_aux: bool = False,
    has_key: bool = False,
    has_state: bool = False,
    batch_norm: str = "microbatch",
    trainable: Any = None,
    reduction: str = "mean",
    remat: Remat = "none",
    compile: Compile = True,
    accum_dtype: torch.dtype | None = None,
    devices: Sequence[torch.device | str | int] | None = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    timeout: float = 60.0,
) -> Pipeline:
    """Make a pipeline of stage functions, in this process or over a process group.

    Without `group` and `mesh` this process drives all ranks. With one of them every process of the
    group makes the same pipeline and drives its own rank: it passes the parameters of its own
    stages (`Pipeline.local` keeps those) and gets their gradients; the loss comes back everywhere.

    Args:
        stages: one function ``(params, x) -> y`` per stage of `schedule`, or `fpipe.Stage`. Pytrees
            of tensors in and out; stage 0 gets the microbatch as ``x``. Or one function
            ``loss_fn(params, batch) -> scalar`` of the whole model that executes `fpipe.cut`
            between stages; `params` is then one pytree of its own structure, whose leaves any
            stage may read, and there is no `loss`.
        loss: ``(y, microbatch) -> scalar``, of the last stage's output. With ``reduction="mean"``
            it must be the mean over the rows of the microbatch. It returns more where `has_aux` or
            `reduction` declare it.
        schedule: who does what in which order; its number of microbatches is how many parts each
            batch is split into.
        in_dims: pytree prefix of the batch: the dimension that is split, or None for a leaf that
            every microbatch gets whole, as in `torch.func.vmap`.
        out_dims: pytree prefix of aux: the dimension along which the leaves of the microbatches are
            concatenated, or None to keep the last microbatch's leaf. A leaf without dimensions has
            none to concatenate along: those of the microbatches are stacked, with one entry each.
            The same for the output of `Pipeline.forward`.
        has_aux: the loss function returns ``(loss, aux)``: aux is any pytree of tensors, made in
            any stage. It comes back beside loss and gradients, and no gradient flows from it.
        has_key: one function is ``loss_fn(params, batch, key)``, called with the keyword argument
            ``key``, which is ``fpipe.random.fold_in(key, m)`` for microbatch `m`. Of stages each
            says for itself whether it reads a key: ``fpipe.Stage(fn, reads_key=True)``.
        has_state: the function is ``loss_fn(params, state, batch)`` and returns the new state after
            the loss, ``(loss, state)`` or ``(loss, state, aux)``; ``step``, ``value`` and
            ``forward`` take the state after the parameters. A state is any pytree of tensors, such
            as running statistics: each microbatch begins with what the one before has left, and no
            gradient flows through it. A leaf must be read and brought up to date in one stage, and
            a stage's forwards must run in the order of the microbatches, as they do in all families
            of `fpipe.schedules`: so the state is the same on every schedule, remat policy and
            transport.
        batch_norm: when the running statistics in a state, `fpipe.nn.BatchStats`, take in those of
            the data. ``"microbatch"``: at each microbatch, as layers do that know of no
            microbatches. ``"deferred"``: at the end of the step, those of the whole batch at once,
            so that they are what they would be without microbatches (torchgpipe,
            arXiv 2004.09910). In both each microbatch is normalised by its own.
        trainable: which parameters get a gradient; None for all. A pytree prefix of bools over the
            parameters, ``[False, {"w": False, "lora": True}]``, or a function of the path of a
            leaf, a tuple of keys and indices: ``lambda path: "lora" in path``. The gradients of the
            others are None, and nothing is computed, kept or sent for them: stages before the
            first that is trained run no backward, and `schedule` may leave theirs out.
        reduction: how the losses of microbatches make the batch's. ``"mean"`` weighs them by their
            rows; ``"sum"`` adds them. With ``"weighted"`` the loss function returns
            ``(sum, weight)`` in place of the loss, and the loss is the sum of all sums divided by
            the sum of all weights, exactly, however the weight (such as a number of tokens) is
            spread over the microbatches. A weight is one real number, and a constant to the
            derivative: it should not depend on the parameters.
        remat: ``"none"`` keeps what the backward reads; ``"full"`` keeps each stage's inputs and
            computes the rest again; ``"except_last"`` is full but for the last microbatch of each
            stage; a callable decides for each traced forward node whether its value may be kept.
            The result never depends on it.
        compile: True for Inductor; False to run the traced graphs uncompiled; a mapping with
            ``backend``, ``mode`` and ``options`` as for `torch.compile`; or a callable from a
            graph module and example inputs to a boxed callable.
        accum_dtype: dtype in which gradients are summed over microbatches, None for that of each
            parameter. Gradients are returned in the parameters' dtypes.
        devices: the device of each rank, on which the parameters of its stages must lie. None
            leaves everything on the device that it is on. Not with `group` or `mesh`.
        group: a process group with one process per rank of the schedule (gloo or NCCL), such as
            ``torch.distributed.group.WORLD``.
        mesh: instead of `group`, a `DeviceMesh` whose dimension ``"pp"`` is the pipeline.
        timeout: with a group, seconds after which a rank that does not respond is given up. A rank
            that computes or compiles responds.

    Returns:
        A `Pipeline`, with ``step``, ``value`` and ``forward``.

    Raises:
        ScheduleError: the schedule cannot run.
        StageError: an argument is wrong, or there is not one stage for each of the schedule's.

    Example:
        >>> import torch, fpipe
        >>> stage = lambda w, x: torch.tanh(x["x"] @ w) if isinstance(x, dict) else x @ w
        >>> loss = lambda y, microbatch: (y - microbatch["y"]).square().mean()
        >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=4)
        >>> pipe = fpipe.pipeline([stage, stage], loss, schedule, compile=False)
        >>> params = [torch.eye(3), torch.ones(3, 1)]
        >>> value, grads = pipe.step(params, {"x": torch.zeros(8, 3), "y": torch.ones(8, 1)})
        >>> value.item(), [tuple(g.shape) for g in grads]
        (1.0, [(3, 3), (3, 1)])
    """
    whole = callable(stages) and not isinstance(stages, Stage)
    chosen_loss: Any = whole_loss(stages, loss) if whole else loss
    chosen_schedule: Any = schedule
    return Pipeline(
        Definition(
            stages=() if whole else stages_of(stages),
            loss=chosen_loss,
            function=whole,
            schedule=chosen_schedule,
            in_dims=in_dims,
            out_dims=out_dims,
            has_aux=has_aux,
            has_key=has_key,
            has_state=has_state,
            convention=called(has_state, batch_norm),
            trainable=Trainable(trainable),
            reduction=reduction,
            remat=remat,
            compile=compile,
            accum_dtype=accum_dtype,
            devices=placed(devices),
            group=group_of(group, mesh),
            timeout=timeout,
        )
    )
