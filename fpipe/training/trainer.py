"""A trainer: a pipeline's step and an optimizer's as one pure function.

params, state, batch ──► pipe.step ──► loss, grads ──► clip ──► update ──► params, state
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fpipe.errors import FpipeError, a_type
from fpipe.inputs.signature import Goal
from fpipe.pipelines import Pipeline, engine_of
from fpipe.program.program import Program
from fpipe.training.loss_scaling import check_scaled
from fpipe.training.savable import Savable
from fpipe.training.stepping import Call, Settings, step
from fpipe.training.train_step import TrainState
from fpipe.training.trees import LeafByLeaf


class Trainer(Savable):
    """A pipeline with an optimizer: what `fpipe.train` returns.

    It is a value: it holds neither parameters nor their state, which `step` takes and returns.

    Args:
        settings: what it was made with.

    Attributes:
        pipe: computes loss and gradients.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(
            settings.pipe, settings.rule, donate=settings.donate, scaling=settings.scaling
        )
        self._settings = settings

    def __repr__(self) -> str:
        return f"<Trainer of {self.pipe!r}>"

    def init(self, params: Any) -> TrainState:
        """The state of the optimizer before its first step.

        Args:
            params: as for `step`; shapes, dtypes and devices count. Over a process group those of
                this process's stages.

        Returns:
            A `TrainState`. Its tensors lie where their parameters do. What the first step makes by
            itself, as a momentum, is 0 until then.

        Raises:
            FpipeError: in one process, the optimizer changes none of the parameters.
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
        """
        within = self._settings.rule_within(()) is not None
        clips = self._settings.max_norm is not None
        goal: Goal = ("clip" if clips else "update") if within else "step"
        return engine_of(self.pipe).programs(goal, params, *arguments, key=key, **named)
