"""A trainer: a pipeline's step and an optimizer's as one pure function.

params, state, batch ──► pipe.step ──► loss, grads ──► clip ──► update ──► params, state
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.convention import DEFERRED, PLAIN, STATE
from fpipe.errors import FpipeError, a_type
from fpipe.execute.gradient_squares import home_of
from fpipe.execute.run_result import RunResult
from fpipe.inputs.ambient import is_within
from fpipe.inputs.params import Move
from fpipe.inputs.signature import Goal
from fpipe.pipelines import Pipeline, engine_of
from fpipe.program.program import Program
from fpipe.torch_internals import innermost_value, is_transformed
from fpipe.training.donation import check_donated
from fpipe.training.savable import Savable
from fpipe.training.train_step import (
    TrainState,
    TrainStep,
    TrainStepAux,
    TrainStepState,
    TrainStepStateAux,
)
from fpipe.training.trees import LeafByLeaf, LeafSteps, Rule
from fpipe.transforms.norms import global_norm, scale_of, scaled_to

Clip = Literal["validate", "wait"]
CLIPS: Final = ("validate", "wait")


class Trainer(Savable):
    """A pipeline with an optimizer: what `fpipe.train` returns.

    It is a value: it holds neither parameters nor their state, which `step` takes and returns.

    Args:
        pipe: computes loss and gradients.
        rule: makes parameters and state of the next step.
        max_norm: what gradients are clipped to; None for no clipping.
        clip: as for `train`.
        donate: as for `train`.
        skips: as ``skip_nonfinite`` for `train`.
        averages: the state has averages of the parameters.

    Attributes:
        pipe: computes loss and gradients.
    """

    def __init__(
        self,
        pipe: Pipeline,
        rule: Rule,
        max_norm: float | None,
        clip: Clip = "validate",
        *,
        donate: bool = False,
        skips: bool = False,
        averages: bool = False,
    ) -> None:
        super().__init__(pipe, rule, donate=donate)
        self._max_norm = max_norm
        self._clip = clip
        self._skips = skips
        self._averages = averages

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
        """
        count = torch.zeros((), dtype=torch.int64, device="cpu")
        return TrainState(count, self._rule.init(params))

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
        if self._donate:
            return self._donated(params, state, arguments, key, passed, named)
        rule = self._rule_within(named.values())
        if rule is not None:
            return self._within(rule, params, state, arguments, key, passed, named)
        result = self.pipe.step(params, *arguments, key=key, **passed)
        grads, norm = result.grads, None
        if self._max_norm is not None:
            norm = self._norm(grads)
            if self._skips_step(norm):
                return self._beside(result, params, state, norm)
            grads = scaled_to(grads, scale_of(norm, self._max_norm))
        tracked = _is_differentiated([result.loss, *named.values()])
        with torch.set_grad_enabled(torch.is_grad_enabled() and tracked):
            moved, moments = self._rule.update(
                grads, state.moments, params, _number(state.steps), named
            )
        return self._beside(result, moved, TrainState(state.steps + 1, moments), norm)

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
        if not self._averages or not isinstance(self._rule, LeafByLeaf):
            raise FpipeError(
                "trainer.averages of a trainer that keeps none: fpipe.train(…, ema=0.999)"
            )
        return self._rule.averages(params, state.moments)

    def _skips_step(self, norm: Tensor) -> bool:
        """Whether parameters and state stay as they are; all ranks have the same norm."""
        if not self._skips:
            return False
        if is_transformed(norm):
            raise FpipeError(
                "skip_nonfinite=True within a transform of torch.func, in which no step can be "
                "left out: make the trainer without it"
            )
        return not bool(norm.isfinite())

    def _beside(self, result: Any, params: Any, state: TrainState, norm: Tensor | None) -> Any:
        """What a step returns beside parameters and state that are known."""
        kind = engine_of(self.pipe).definition
        model_state = result.state if kind.has_state else None
        aux = result.aux if kind.has_aux else None
        return self._returned(result.loss, params, state, norm, model_state, aux)

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
        if self._skips:
            raise FpipeError(
                "fpipe.vmap of a trainer with skip_nonfinite=True, which leaves out the step of "
                "all members or of none: make the trainer without it"
            )
        pipe, rule = transform(self.pipe), self._rule.of_members()
        alone = engine_of(pipe).definition.alone
        if alone is None or alone.in_dims[0] != 0:
            raise FpipeError(
                "in_dims of fpipe.vmap(trainer) must stack all parameters along dimension 0, as "
                "in_dims=(0, None) does: each member has its own, and its own state"
            )
        return Trainer(
            pipe,
            rule,
            self._max_norm,
            self._clip,
            donate=self._donate,
            averages=self._averages,
        )

    def _norm(self, grads: Any) -> Tensor:
        """The norm of the gradients; of an ensemble's, one for each member."""
        if engine_of(self.pipe).definition.alone is None:
            return global_norm(grads, pipe=self.pipe)
        members = len(pytree.flatten(grads)[0][0])
        parts = (pytree.tree_map(lambda g, m=m: g[m], grads) for m in range(members))
        return torch.stack([global_norm(part, pipe=self.pipe) for part in parts])

    def _donated(
        self,
        params: Any,
        state: TrainState,
        arguments: Sequence[Any],
        key: Tensor | None,
        passed: Mapping[str, Any],
        named: Mapping[str, Any],
    ) -> Any:
        """A step that writes into parameters and state, when all gradients are there."""
        assert isinstance(self._rule, LeafByLeaf)
        rule, engine = self._rule, engine_of(self.pipe)

        def read() -> LeafSteps:
            check_donated(params, named.values())
            before = _number(state.steps)
            return rule.step(state.moments, params, before, named, in_place=True)

        with torch.no_grad():
            step = engine.told("step", read)
            result = self.pipe.step(params, *arguments, key=key, **passed)
            kind = engine.definition
            loss, model_state = result.loss, result.state if kind.has_state else None
            aux = result.aux if kind.has_aux else None
            grads, norm, scale = [result.grads], None, None
            del result  # which has the gradients
            if self._max_norm is not None:
                norm = self._norm(grads[0])
                if self._skips_step(norm):
                    return self._returned(loss, params, state, norm, model_state, aux)
                scale = scale_of(norm, self._max_norm)
            step.write_all(grads, None if scale is None or bool((scale == 1).all()) else scale)
            state.steps.add_(1)
            return self._returned(loss, params, state, norm, model_state, aux)

    def _rule_within(self, hyper: Iterable[Any]) -> LeafByLeaf | None:
        """The rule, if stages can be updated within the step; None if all are updated after it.

        All ranks find the same: the parameters of some say nothing about it.

        Args:
            hyper: values of hyperparameters.
        """
        definition = engine_of(self.pipe).definition
        plain = (
            self._clip != "wait"
            and not self._donate
            and definition.convention in (PLAIN, STATE, DEFERRED)
            and definition.reduction != "weighted"
            and definition.devices is None
            and not definition.loss_shape
        )
        if not plain or is_within() or _is_differentiated(list(hyper)):
            return None
        return self._rule if isinstance(self._rule, LeafByLeaf) else None

    def _within(
        self,
        rule: LeafByLeaf,
        params: Any,
        state: TrainState,
        arguments: Sequence[Any],
        key: Tensor | None,
        passed: Mapping[str, Any],
        named: Mapping[str, Any],
    ) -> Any:
        """A step in which each stage is updated as soon as its gradients are whole.

        The norm is known only when those of all ranks are. Where it turns out to be too great, the
        updates are made again, of clipped gradients.
        """
        clips = self._max_norm is not None
        steps: list[LeafSteps] = []

        def read() -> tuple[Sequence[Any], Move]:
            count = _number(state.steps)
            steps.append(rule.step(state.moments, params, count, named, squares=clips))
            return steps[0].states, steps[0].move

        with torch.no_grad():
            outcome = engine_of(self.pipe).run_updating(
                read, params, *arguments, key=key, clips=clips, **passed
            )
            [step] = steps
            moved = outcome.updates()
            norm, grads = outcome.norm, None
            if outcome.leaves_gradients() or (clips and norm is None):
                grads = outcome.take_grads()
                step.move_others(moved, grads)
            if self._max_norm is not None:
                if norm is None:  # of DTensors, whose parts are counted over their mesh
                    norm = global_norm(grads, pipe=self.pipe)
                norm = norm.to(home_of(step.leaves))
                if self._skips_step(norm):
                    loss, model_state, aux = outcome.without_grads()
                    return self._returned(loss, params, state, norm, model_state, aux)
                scale = scale_of(norm, self._max_norm)
                if not bool(scale == 1):
                    grads = scaled_to(outcome.take_grads() if grads is None else grads, scale)
                    return self._finished(
                        outcome,
                        *rule.update(grads, state.moments, params, step.before, named),
                        state,
                        norm,
                    )
            return self._finished(outcome, *step.trees(moved), state, norm)

    def _finished(
        self, outcome: RunResult, params: Any, moments: Any, state: TrainState, norm: Tensor | None
    ) -> Any:
        loss, model_state, aux = outcome.without_grads()
        after = TrainState(state.steps + 1, moments)
        return self._returned(loss, params, after, norm, model_state, aux)

    def _returned(
        self,
        loss: Tensor,
        params: Any,
        state: TrainState,
        norm: Tensor | None,
        model_state: Any,
        aux: Any,
    ) -> Any:
        """The named tuple of all that the pipeline declares."""
        kind = engine_of(self.pipe).definition
        common = (loss, params, state, norm)
        if kind.has_state and kind.has_aux:
            return TrainStepStateAux(*common, model_state, aux)
        if kind.has_state:
            return TrainStepState(*common, model_state)
        return TrainStepAux(*common, aux) if kind.has_aux else TrainStep(*common)

    def programs(
        self, params: Any, *arguments: Any, key: Tensor | None = None, **named: Any
    ) -> tuple[Program, ...]:
        """The program of each rank for a training step: to be printed and read.

        Arguments are those of `Pipeline.programs`. Where stages are not updated within the step,
        as with ``clip="wait"``, its programs are those of the pipeline. ``program.peak_bytes``
        counts the parameters that a step makes, and not the state of the optimizer.
        """
        within = self._rule_within(()) is not None
        clips = self._max_norm is not None
        goal: Goal = ("clip" if clips else "update") if within else "step"
        return engine_of(self.pipe).programs(goal, params, *arguments, key=key, **named)


def _number(count: Tensor) -> int:
    """The number of steps, which the members of an ensemble have in common."""
    counts = innermost_value(count).flatten()
    number = int(counts[0])
    if not bool((counts == number).all()):
        raise FpipeError(
            f"state.steps is {counts.tolist()}: members of an ensemble must have made as many steps"
        )
    return number


def _is_differentiated(values: Sequence[Any]) -> bool:
    """Whether a transform or autograd wants the history of a step."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return any(value.requires_grad or is_transformed(value) for value in tensors)
