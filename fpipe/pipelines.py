"""The pipeline: what a user builds once and calls every step, and the pipeline in use."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import replace
from typing import Any, NoReturn, Protocol, Self

from torch import Tensor

from fpipe.engine import OWN, Engine
from fpipe.errors import FpipeError, StageError, a_type
from fpipe.execute.header import Addend
from fpipe.parameters.loadable import Loadable
from fpipe.program.program import Program
from fpipe.schedule import Schedule
from fpipe.spec.definition import Definition


class Pipeline(Loadable):
    """A pipeline-parallel step as a pure function: what `fpipe.pipeline` and its like return.

    It is not called directly: make one with `fpipe.pipeline` or `fpipe.from_module`.
    In one process several threads may call it at one time; over a group, one call runs at a time.

    Args:
        definition: all that it is made from.
        like: the engine of a pipeline that differs in its schedule alone, whose traces and kernels
            serve this one too; None for none.

    Attributes:
        schedule: what it runs.
        rank: the rank that this process drives; None if it drives all of them.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
        >>> stages = [lambda w, x: x * w, lambda w, x: x + w]
        >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
        >>> params = [torch.tensor(2.0), torch.tensor(1.0)]
        >>> pipe
        <Pipeline of <Schedule zb_h1: 2 ranks, 2 stages, 2 microbatches>>
    """

    def __init__(self, definition: Definition, like: Engine | None = None) -> None:
        if not isinstance(definition, Definition):
            raise StageError(
                f"fpipe.Pipeline({definition!r:.60}) is not called directly: "
                "fpipe.pipeline(stages, loss, schedule) makes one"
            )
        self._engine = Engine(definition) if like is None else like.under(definition)
        self.schedule, self.rank = self._engine.schedule, self._engine.rank

    def __repr__(self) -> str:
        return f"<Pipeline of {self.schedule!r}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise FpipeError(
            f"{self!r} cannot be copied or pickled, for its code and connections are this "
            "process's: make another of the same functions and schedule where it is needed, and "
            "keep it out of objects that are copied, such as modules. To go on later save "
            "parameters and state, with torch.save or trainer.save, and pipe.schedule.to_json()"
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

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
            >>> stages = [lambda w, x: x * w, lambda w, x: x + w]
            >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
            >>> params = [torch.tensor(2.0), torch.tensor(1.0)]
            >>> loss, grads = pipe.step(params, torch.tensor([1.0, 2.0, 3.0]))
            >>> loss.item(), [grad.item() for grad in grads]
            (5.0, [2.0, 1.0])
        """
        arguments, key = self._engine.in_order("step", arguments, key, named)
        return self._engine.step(params, *arguments, key=key)

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

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
            >>> stages = [lambda w, x: x * w, lambda w, x: x + w]
            >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
            >>> params = [torch.tensor(2.0), torch.tensor(1.0)]
            >>> pipe.value(params, torch.tensor([1.0, 2.0, 3.0])).item()
            5.0
            >>> weights = tuple(params)
            >>> torch.func.grad(lambda w: pipe.value(list(w), torch.ones(2)))(weights)[0].item()
            1.0
        """
        arguments, key = self._engine.in_order("value", arguments, key, named)
        loss: Tensor = self._engine.value(params, *arguments, key=key)
        return loss

    def forward(
        self,
        params: Any,
        *arguments: Any,
        key: Tensor | None = None,
        out_dims: Any = OWN,
        **named: Any,
    ) -> Any:
        """The output for the whole batch, by running forward only.

        For stages that is the last one's output; the loss is not computed. For one function it is
        its loss and, as a named tuple, the aux that it must declare with ``has_aux=True``; a new
        state is dropped.

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
            returned on the rank of the last stage, and None on the others. For one function
            `ForwardAux`, ``(loss, aux)``.

        Raises:
            BatchError: as in `step`, or an output leaf cannot be concatenated.
            StageError: as in `step`, or one function declares no aux.

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
            >>> stages = [lambda w, x: x * w, lambda w, x: x + w]
            >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
            >>> params = [torch.tensor(2.0), torch.tensor(1.0)]
            >>> pipe.forward(params, torch.tensor([1.0, 2.0, 3.0])).tolist()
            [3.0, 5.0, 7.0]
        """
        arguments, key = self._engine.in_order("forward", arguments, key, named)
        return self._engine.forward(params, *arguments, key=key, out_dims=out_dims)

    def with_schedule(self, schedule: Schedule) -> Self:
        """The same stages, loss and options under another schedule.

        The two share what either has traced and compiled, so many schedules of one model cost
        little more than one. Only if a stage moves to another one of the `devices` is all made
        anew.

        Args:
            schedule: with as many stages.

        Raises:
            ScheduleError: the schedule cannot run.
            StageError: it has another number of stages, or of ranks than the process group.

        Returns:
            A pipeline of the same kind.

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
            >>> stages = [lambda w, x: x * w, lambda w, x: x + w]
            >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
            >>> params = [torch.tensor(2.0), torch.tensor(1.0)]
            >>> other = pipe.with_schedule(fpipe.schedules.gpipe(ranks=2, microbatches=4))
            >>> batch = torch.ones(4)
            >>> bool(other.value(params, batch) == pipe.value(params, batch))
            True
        """
        return type(self)(replace(self._engine.definition, schedule=schedule), like=self._engine)

    def local(self, params: Any) -> Any:
        """`params` with None in place of the parts that belong to other processes.

        Args:
            params: sequence with one entry per stage, of any kind: parameters, optimizers, names.
                The parameters of one function, which has no parts, are returned whole.

        Returns:
            A list of as many entries; in one process the whole of `params`.

        Raises:
            BatchError: `params` has not one entry per stage.

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
            >>> stages = [lambda w, x: x * w, lambda w, x: x + w]
            >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
            >>> params = [torch.tensor(2.0), torch.tensor(1.0)]
            >>> pipe.local(["first", "last"])
            ['first', 'last']
        """
        return self._engine.local(params)

    def programs(
        self, params: Any, *arguments: Any, key: Tensor | None = None, **named: Any
    ) -> tuple[Program, ...]:
        """The program of each rank for a step on arguments of these shapes: to be printed and read.

        ``program.peak_bytes`` is what the rank will hold at most, beside parameters and batch.
        Tensors on the meta device will do; a step on real tensors of those shapes, which lie on the
        CPU or on the devices of the pipeline, then runs these programs. They depend on no key:
        it may be left out. Over a process group it is a collective, as a step is: every rank calls
        it, outside of any ``if rank == 0``, and one may print what it returns.

        Args:
            params: as in `step`.
            arguments: as in `step`.
            key: as in `step`.
            named: as in `step`.

        Returns:
            A program for each rank, in their order.

        Raises:
            BatchError: as in `step`, and so are StageError, ScheduleError and PipelineError.

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
            >>> stages = [lambda w, x: x * w, lambda w, x: x + w]
            >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
            >>> params = [torch.tensor(2.0), torch.tensor(1.0)]
            >>> [program.peak_bytes for program in pipe.programs(params, torch.ones(4))]
            [20, 24]
        """
        return self._engine.programs("step", params, *arguments, key=key, **named)

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

        Returns:
            The sum; in one process the number itself.

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
            >>> stages = [lambda w, x: x * w, lambda w, x: x + w]
            >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
            >>> params = [torch.tensor(2.0), torch.tensor(1.0)]
            >>> pipe.add_up(3)
            3
        """
        make = value if callable(value) else lambda: value
        return self._engine.add_up(lambda: Addend(make()), deed=deed, call=call)[0]


class HasEngine(Protocol):
    """A `Pipeline`, or what a transform has made that runs one."""

    _engine: Engine


def engine_of(pipe: HasEngine) -> Engine:
    """The engine of a pipeline, for other parts of fpipe."""
    return pipe._engine


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


_CURRENT: ContextVar[Pipeline | None] = ContextVar("fpipe.pipelines", default=None)


class use:
    """Make a pipeline the one that `fpipe.step` runs: ``with fpipe.use(pipe): …``.

    It holds for the current thread or task and may be nested; each thread has one of its own.

    Args:
        pipe: what `fpipe.pipeline` or `fpipe.from_module` returns, or a transform whose ``step``
            takes no vector and returns gradients, such as `fpipe.vmap`.

    Raises:
        FpipeError: `pipe` is no pipeline.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.gpipe(ranks=1, microbatches=2)
        >>> stage, loss = (lambda w, x: x * w), (lambda y, _: y.mean())
        >>> pipe = fpipe.pipeline([stage], loss, schedule, compile=False)
        >>> with fpipe.use(pipe) as used:
        ...     used is pipe
        True
    """

    def __init__(self, pipe: Pipeline) -> None:
        check_is_pipeline("pipe", pipe, "fpipe.use")
        self._pipe = pipe
        self._tokens: list[Token[Pipeline | None]] = []

    def __enter__(self) -> Pipeline:
        self._tokens.append(_CURRENT.set(self._pipe))
        return self._pipe

    def __exit__(self, *exception: object) -> None:
        _CURRENT.reset(self._tokens.pop())


def in_use() -> Pipeline | None:
    """The pipeline that `use` names, if it names one."""
    return _CURRENT.get()


def step(
    params: Any,
    *arguments: Any,
    key: Tensor | None = None,
    pipe: Pipeline | None = None,
    **named: Any,
) -> Any:
    """Loss and gradients of one batch, by `pipe` or the one that `fpipe.use` names.

    Arguments, result and errors are those of `Pipeline.step`.

    Raises:
        FpipeError: no pipeline is given or in use.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.gpipe(ranks=1, microbatches=2)
        >>> stage, loss = (lambda w, x: x * w), (lambda y, _: y.mean())
        >>> with fpipe.use(fpipe.pipeline([stage], loss, schedule, compile=False)):
        ...     value, grads = fpipe.step([torch.tensor(2.0)], torch.ones(4))
        >>> value.item(), grads[0].item()
        (2.0, 1.0)
    """
    chosen = pipe or in_use()
    if chosen is None:
        raise FpipeError(
            "fpipe.step needs a pipeline: call it within `with fpipe.use(pipe):`, or pass pipe=pipe"
        )
    check_is_pipeline("pipe", chosen, "fpipe.step")
    return chosen.step(params, *arguments, key=key, **named)
