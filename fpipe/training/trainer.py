"""A trainer: a pipeline's step and an optimizer's as one pure function; and its checkpoints.

params, state, batch ──► pipe.step ──► loss, grads ──► clip ──► update ──► params, state
"""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from fpipe.checkpoint.checkpoint_writer import Content, PendingSave, absolute
from fpipe.errors import FpipeError, a_type
from fpipe.inputs.signature import Goal
from fpipe.parameters.savers import savers_of
from fpipe.pipelines import Pipeline, engine_of
from fpipe.program.program import Program
from fpipe.training.loss_scaling import check_scaled
from fpipe.training.saving import content_of, load
from fpipe.training.stepping import Call, Settings, clones, step
from fpipe.training.train_step import TrainState
from fpipe.training.trees import LeafByLeaf


class Trainer:
    """A pipeline with an optimizer: what `fpipe.train` returns.

    It is a value: it holds neither parameters nor their state, which `step` takes and returns.

    Args:
        settings: what it was made with.

    Attributes:
        pipe: computes loss and gradients.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.gpipe(ranks=1, microbatches=2)
        >>> pipe = fpipe.pipeline([torch.mul], lambda y, _: y.mean(), schedule, compile=False)
        >>> trainer = fpipe.train(pipe, torch.optim.SGD, lr=0.5)
        >>> params = [torch.tensor(3.0)]
        >>> loss, params, state, norm = trainer.step(params, trainer.init(params), torch.ones(2))
        >>> params[0].item()
        2.5
    """

    def __init__(self, settings: Settings) -> None:
        self.pipe = settings.pipe
        self._settings, self._rule = settings, settings.rule

    def __repr__(self) -> str:
        return f"<Trainer of {self.pipe!r}>"

    def init(self, params: Any) -> TrainState:
        """The state of the optimizer before its first step.

        Args:
            params: as for `step`; shapes, dtypes and devices count. Over a process group those of
                this process's stages.

        Returns:
            A `TrainState`. Its tensors lie where their parameters do. A tensor that the first step
            makes by itself, as a momentum, is 0 until then.

        Raises:
            FpipeError: in one process, the optimizer changes none of the parameters.

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
            >>> stages = [lambda w, x: x * w, lambda w, x: x + w]
            >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
            >>> trainer = fpipe.train(pipe, torch.optim.SGD, lr=0.5)
            >>> params = [torch.tensor(2.0), torch.tensor(0.0)]
            >>> state = trainer.init(params)
            >>> int(state.steps)
            0
        """
        rule, alone = self._rule, self.pipe.rank is None
        if alone and isinstance(rule, LeafByLeaf) and not any(map(bool, rule.trained(params))):
            raise FpipeError(
                "params has nothing that the optimizer changes: it has no floating-point tensor, "
                "or trainable= of the pipeline and groups= of fpipe.train leave all as they are"
            )
        count, scaling = torch.zeros((), dtype=torch.int64, device="cpu"), self._settings.scaling
        if scaling is not None and isinstance(self._rule, LeafByLeaf):
            check_scaled(self._rule.trained(params))
        return TrainState(
            count, self._rule.init(params), None if scaling is None else scaling.init()
        )

    def step(
        self,
        params: Any,
        state: TrainState,
        *arguments: Any,
        key: Tensor | None = None,
        **named: Any,
    ) -> Any:
        """One training step: loss, gradients, clipping and update.

        Nothing that is passed in is changed, but for what is donated.

        Args:
            params: as for `Pipeline.step`. With ``donate=True`` the step writes into them, and
                returns them.
            state: what `init` or the step before has returned. It is donated as `params` are.
            arguments: the batch, after the model's state where ``has_state`` declares one.
            key: as for `Pipeline.step`.
            named: hyperparameters of this step in place of the defaults, ``lr=3e-4``: numbers, or
                tensors without dimensions, which may be mapped by `torch.func.vmap` or have a
                history. A group keeps what it sets. The batch and the model's state may come by
                name too, as ``batch`` and ``model_state``.

        Returns:
            A `TrainStep`, ``(loss, params, state, norm)``. With ``has_state`` a `TrainStepState`,
            with ``has_aux`` a `TrainStepAux`, with both a `TrainStepStateAux`, which have
            ``model_state`` and ``aux`` after those.

        Raises:
            FpipeError: a hyperparameter is not the optimizer's, or `state` does not belong to
                `params`.
            BatchError: as `Pipeline.step` raises it, and so are StageError, ScheduleError and
                PipelineError.

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
            >>> stages = [lambda w, x: x * w, lambda w, x: x + w]
            >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
            >>> trainer = fpipe.train(pipe, torch.optim.SGD, lr=0.5)
            >>> params = [torch.tensor(2.0), torch.tensor(0.0)]
            >>> state = trainer.init(params)
            >>> loss, params, state, norm = trainer.step(params, state, torch.ones(4))
            >>> loss.item(), [param.item() for param in params]
            (2.0, [1.5, -0.5])
        """
        if not isinstance(state, TrainState):
            raise FpipeError(
                f"state={state!r:.60} is {a_type(state)}: trainer.init(params) makes the first, "
                "and each step returns the next"
            )
        # A batch and a model's state may come by name.
        names = {"batch": "batch", "model_state": "state"}
        passed = {names[name]: named.pop(name) for name in names if name in named}
        return step(self._settings, Call(params, state, arguments, key, passed, named))

    def averages(self, params: Any, state: TrainState) -> Any:
        """The averages over the steps that ``ema=`` keeps: parameters to evaluate and to deploy.

        Args:
            params: as `step` returned them.
            state: as `step` returned it.

        Returns:
            In the structure of `params`: the average of each leaf that is trained, no copy of it,
            and the other leaves as they are.

        Raises:
            FpipeError: the trainer has no ``ema``, or `state` does not belong to `params`.

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
            >>> stages = [lambda w, x: x * w, lambda w, x: x + w]
            >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
            >>> trainer = fpipe.train(pipe, torch.optim.SGD, lr=0.5, ema=0.5)
            >>> params = [torch.tensor(2.0), torch.tensor(0.0)]
            >>> state = trainer.init(params)
            >>> _, params, state, _ = trainer.step(params, state, torch.ones(4))
            >>> trainer.averages(params, state)[0].item()
            1.75
        """
        if not self._settings.averages or not isinstance(self._rule, LeafByLeaf):
            raise FpipeError(
                "trainer.averages of a trainer that keeps none: fpipe.train(…, ema=0.999)"
            )
        return self._rule.averages(params, state.moments)

    def of_members(self, transform: Callable[[Pipeline], Pipeline]) -> Trainer:
        """The trainer of an ensemble: what `fpipe.vmap` of a trainer returns.

        Args:
            transform: makes the pipeline of the ensemble.

        Returns:
            A trainer whose ``step`` takes stacked parameters.

        Raises:
            FpipeError: its optimizer is a pair of functions, or it skips steps.

        Example:
            >>> import functools
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.gpipe(ranks=1, microbatches=2)
            >>> pipe = fpipe.pipeline([torch.mul], lambda y, _: y.mean(), schedule, compile=False)
            >>> trainer = fpipe.train(pipe, torch.optim.SGD, lr=0.5)
            >>> both = trainer.of_members(functools.partial(fpipe.vmap, in_dims=(0, None)))
            >>> params = [torch.tensor([3.0, 5.0])]
            >>> both.step(params, both.init(params), torch.ones(2)).loss.tolist()
            [3.0, 5.0]
        """
        if not isinstance(self._rule, LeafByLeaf):
            raise FpipeError(
                "fpipe.vmap of a trainer whose optimizer is a pair of functions: make one of "
                "(torch.func.vmap(init), torch.func.vmap(update)) and fpipe.vmap(trainer.pipe)"
            )
        if self._settings.skips:
            raise FpipeError(
                "fpipe.vmap of a trainer with loss_scale= or skip_nonfinite=True, which leaves out "
                "the step of all members or of none: make the trainer without it"
            )
        pipe, rule = transform(self.pipe), self._rule.of_members()
        alone = engine_of(pipe).definition.alone
        if alone is None or alone.in_dims[0] != 0:
            raise FpipeError(
                "in_dims of fpipe.vmap(trainer) must stack all parameters along dimension 0, as "
                "in_dims=(0, None) does: each member has its own, and its own state"
            )
        return Trainer(self._settings._replace(pipe=pipe, rule=rule))

    def programs(
        self, params: Any, *arguments: Any, key: Tensor | None = None, **named: Any
    ) -> tuple[Program, ...]:
        """The program of each rank for a training step: to be printed and read.

        Arguments are those of `Pipeline.programs`. Where stages are not updated within the step,
        as with ``clip="wait"``, its programs are those of the pipeline. ``program.peak_bytes``
        counts the parameters that a step makes, and not the state of the optimizer.

        Returns:
            A program for each rank, in their order.

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
            >>> stages = [lambda w, x: x * w, lambda w, x: x + w]
            >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
            >>> trainer = fpipe.train(pipe, torch.optim.SGD, lr=0.5)
            >>> params = [torch.tensor(2.0), torch.tensor(0.0)]
            >>> state = trainer.init(params)
            >>> len(trainer.programs(params, torch.ones(4)))
            2
        """
        within = self._settings.rule_within(()) is not None
        clips = self._settings.max_norm is not None
        goal: Goal = ("clip" if clips else "update") if within else "step"
        return engine_of(self.pipe).programs(goal, params, *arguments, key=key, **named)

    def save(
        self,
        path: str | PathLike[str],
        params: Any,
        state: TrainState,
        *,
        model_state: Any = None,
        step: Any = None,
        extra: Any = None,
        keep: int | None = None,
    ) -> None:
        """Write parameters and states to a directory of `torch.distributed.checkpoint`.

        Over a process group all ranks call it, and each writes what it has. The directory is
        written under another name and renamed, so that a crash leaves the last whole one.

        Args:
            path: of the directory. A checkpoint that is there is replaced.
            params: as `step` returned them.
            state: as `step` returned it.
            model_state: as `step` returned it, of a pipeline with ``has_state=True``.
            step: any number or string to be found again.
            extra: what else is to be found again: trees of tensors, numbers and strings, such as
                the state of a data loader; on the first rank.
            keep: how many checkpoints stay in the parent directory, the oldest go; None for all.

        Raises:
            FpipeError: the state is that of a pair of functions, which has no names; or
                `model_state` is missing.
            PipelineError: a process cannot write, or something else is at `path`; or the last
                `save_async` has failed and nobody has waited for it.

        Example:
            >>> import os, tempfile
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
            >>> stages = [lambda w, x: x * w, lambda w, x: x + w]
            >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
            >>> trainer = fpipe.train(pipe, torch.optim.SGD, lr=0.5)
            >>> params = [torch.tensor(2.0), torch.tensor(0.0)]
            >>> state = trainer.init(params)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     trainer.save(os.path.join(folder, "last"), params, state, step=7)
            ...     trainer.load(os.path.join(folder, "last")).step
            7
        """
        content = self._content(params, state, model_state, step, extra, keep)
        savers = savers_of(engine_of(self.pipe).definition, content.tensors)
        savers.write(absolute(path), content, keep)

    def save_async(
        self,
        path: str | PathLike[str],
        params: Any,
        state: TrainState,
        *,
        model_state: Any = None,
        step: Any = None,
        extra: Any = None,
        keep: int | None = None,
    ) -> PendingSave:
        """Write as `save` does, in a thread, while the next steps run.

        Nothing is copied: a step changes nothing that it is given, so what is written stays as it
        is. Change none of it in place before the end. With ``donate=True``, whose steps do, a copy
        is made first. The processes talk over a group of their own, which the first call makes.
        Only one checkpoint is written at a time: the next save waits.

        Args:
            path: as for `save`.
            params: as for `save`.
            state: as for `save`.
            model_state: as for `save`.
            step: as for `save`.
            extra: as for `save`.
            keep: as for `save`.

        Returns:
            A `PendingSave`: ``wait()`` returns when the checkpoint is whole, and raises what has
            failed; ``done()`` asks. Wait before `destroy_process_group`.

        Raises:
            FpipeError: as for `save`, and so is PipelineError, which ``wait()`` raises too.

        Example:
            >>> import os, tempfile, torch, fpipe
            >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
            >>> stages = [lambda w, x: x * w, lambda w, x: x + w]
            >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
            >>> trainer = fpipe.train(pipe, torch.optim.SGD, lr=0.5)
            >>> params = [torch.tensor(2.0), torch.tensor(0.0)]
            >>> state = trainer.init(params)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     pending = trainer.save_async(os.path.join(folder, "step-0"), params, state)
            ...     moved = trainer.step(params, state, torch.ones(4))
            ...     pending.wait()
            ...     torch.equal(trainer.load(os.path.join(folder, "step-0")).params[0], params[0])
            True
        """
        if self._settings.donate:
            params, state = clones(params, state)
        content = self._content(params, state, model_state, step, extra, keep)
        savers = savers_of(engine_of(self.pipe).definition, content.tensors)
        return savers.start(absolute(path), content, keep)

    def load(
        self,
        path: str | PathLike[str],
        *example: Any,
        like: Any = None,
        like_state: Any = None,
    ) -> Any:
        """Read what `save` has written; over a process group each rank what it needs.

        The number of processes, the schedule and the mesh may be others than those that saved.

        Args:
            path: of the directory.
            example: the batch, or meta tensors of its shapes: what a pipeline of one function or of
                a module, over a process group, is traced on.
            like: parameters, or tensors of their shapes, in the structure that they are to have;
                needed where that has other nodes than dicts, lists and tuples, and for DTensors.
                The pipeline of a module knows it.
            like_state: the same of the model's state, whose nodes may be `fpipe.nn.BatchStats` too.

        Returns:
            A named tuple `Saved`: ``(params, state, step, extra)``; with ``has_state`` a
            `SavedState`, which has ``model_state`` after those.

        Raises:
            BatchError: the directory is none that `save` has written to its end, is mixed of
                several, or does not fit; so where it was saved with another optimizer.
            PipelineError: over a process group, another rank has raised this.

        Example:
            >>> import os, tempfile
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
            >>> stages = [lambda w, x: x * w, lambda w, x: x + w]
            >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
            >>> trainer = fpipe.train(pipe, torch.optim.SGD, lr=0.5)
            >>> params = [torch.tensor(2.0), torch.tensor(0.0)]
            >>> state = trainer.init(params)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     trainer.save(os.path.join(folder, "last"), params, state)
            ...     saved = trainer.load(os.path.join(folder, "last"))
            >>> torch.equal(saved.params[0], params[0])
            True
        """
        rule = self._named_rule("load")
        return load(self.pipe, rule, path, example, like, like_state, self._settings.scaling)

    def _content(
        self,
        params: Any,
        state: TrainState,
        model_state: Any,
        step: Any,
        extra: Any,
        keep: int | None,
    ) -> Content:
        """The content that this process writes; where one process fails, no other goes on."""

        def read() -> Content:
            self._named_rule("save")
            if keep is not None and (not isinstance(keep, int) or keep < 1):
                raise FpipeError(
                    f"keep={keep!r} must be a number of checkpoints, 1 or more, or None"
                )
            return content_of(self.pipe, params, state, model_state, step, extra)

        return engine_of(self.pipe).each("save its parameters", read)

    def _named_rule(self, method: str) -> LeafByLeaf:
        if isinstance(self._rule, LeafByLeaf):
            return self._rule
        raise FpipeError(
            f"trainer.{method} of an optimizer that is a pair of functions: its state has no "
            "names; save what init and update return by torch.save"
        )
