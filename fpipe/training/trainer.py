"""`fpipe.train`: a pipeline's step and an optimizer's as one pure function.

params, state, batch ──► pipe.step ──► loss, grads ──► clip ──► update ──► params, state
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import optree
import torch
from torch import Tensor

from fpipe import pytree
from fpipe.convention import DEFERRED, PLAIN, STATE
from fpipe.errors import FpipeError, a_type, check_choice
from fpipe.execute.gradient_squares import home_of
from fpipe.execute.run_result import RunResult
from fpipe.inputs.ambient import is_within
from fpipe.inputs.params import Move
from fpipe.inputs.signature import Goal
from fpipe.pipelines import Pipeline, check_is_pipeline, engine_of
from fpipe.program.program import Program
from fpipe.torch_internals import innermost_value, is_transformed
from fpipe.training.compiled import kernels_of
from fpipe.training.donation import check_donated
from fpipe.training.groups import Groups, read_groups
from fpipe.training.savable import Savable
from fpipe.training.train_step import (
    TrainState,
    TrainStep,
    TrainStepAux,
    TrainStepState,
    TrainStepStateAux,
)
from fpipe.training.trees import LeafByLeaf, LeafSteps, PairOfFunctions, Rule
from fpipe.training.updates import Updates
from fpipe.transforms.norms import clip_by_global_norm, global_norm, scale_of, scaled_to

Optimizer = (
    type[torch.optim.Optimizer] | tuple[Callable[[Any], Any], Callable[[Any, Any, Any], Any]]
)


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
    ) -> None:
        super().__init__(pipe, rule, donate=donate)
        self._max_norm = max_norm
        self._clip = clip

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
            grads = scaled_to(grads, scale_of(norm, self._max_norm))
        tracked = _is_differentiated([result.loss, *named.values()])
        with torch.set_grad_enabled(torch.is_grad_enabled() and tracked):
            moved, moments = self._rule.update(
                grads, state.moments, params, _number(state.steps), named
            )
        after = TrainState(state.steps + 1, moments)
        kind = engine_of(self.pipe).definition
        model_state = result.state if kind.has_state else None
        aux = result.aux if kind.has_aux else None
        return self._returned(result.loss, moved, after, norm, model_state, aux)

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
        pipe, rule = transform(self.pipe), self._rule.of_members()
        alone = engine_of(pipe).definition.alone
        if alone is None or alone.in_dims[0] != 0:
            raise FpipeError(
                "in_dims of fpipe.vmap(trainer) must stack all parameters along dimension 0, as "
                "in_dims=(0, None) does: each member has its own, and its own state"
            )
        return Trainer(pipe, rule, self._max_norm, self._clip, donate=self._donate)

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
        with torch.no_grad():
            check_donated(params, named.values())
            rule, before = self._rule, _number(state.steps)
            step = rule.step(state.moments, params, before, named, in_place=True)
            result = self.pipe.step(params, *arguments, key=key, **passed)
            kind = engine_of(self.pipe).definition
            loss, model_state = result.loss, result.state if kind.has_state else None
            aux = result.aux if kind.has_aux else None
            grads, norm, scale = [result.grads], None, None
            del result  # which has the gradients
            if self._max_norm is not None:
                norm = self._norm(grads[0])
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


def train(
    pipe: Pipeline,
    optimizer: Optimizer,
    *,
    groups: Groups | None = None,
    max_norm: float | None = None,
    clip: Clip = "validate",
    donate: bool = False,
    **hyperparameters: Any,
) -> Trainer:
    """Put an optimizer beside a pipeline: a whole training step as a pure function.

    The optimizer's own ``step`` is recorded, for one parameter of each kind, as a pure function
    from parameter, gradient and state to parameter and state; it has the bits of torch's
    (``foreach=False``). Hyperparameters are inputs of it, so a new learning rate records nothing.

    Args:
        pipe: of stages, of one function or of a module.
        optimizer: a class of `torch.optim` (not LBFGS, which calls the loss several times, nor
            SparseAdam), or one derived from `torch.optim.Optimizer` that treats each parameter by
            itself and keeps tensors as its state. Or a pair of pure functions, as optax has it:
            ``init(params) -> state`` and ``update(grads, state, params) -> (updates, state)``.
        groups: parameters with hyperparameters of their own: a mapping from names or `fnmatch`
            patterns of names to them, ``{"*.bias": {"weight_decay": 0.0}}``, or a list of such
            pairs, whose first may be a function of a leaf's path. The first that holds a parameter
            counts. None in place of hyperparameters leaves parameters as they are. Names are those
            of `Pipeline.init`.
        max_norm: gradients are clipped to this norm, of all of them together, as
            `clip_by_global_norm` does.
        clip: ``"validate"`` updates each stage with its gradients as they are, where the schedule
            has its ``UPDATE``, while their norm is still under way; where that turns out to be
            greater than `max_norm`, the update is made again, clipped. The bits are the same.
            ``"wait"`` waits for the norm first: it holds no second copy of parameters and state
            when a step is clipped, and is as fast where most are.
        donate: the step writes into the parameters and the state that it is given, and returns the
            same objects: it holds no second copy of either, as an optimizer of torch does not.
            Whoever needs the old ones clones them first. Stages are updated when all gradients are
            there, after the norm; a step that raises before that has changed nothing.
        hyperparameters: what the optimizer is called with: ``lr=3e-4``. Where one has the name of
            an argument of this function, pass a `functools.partial` of the class.

    Raises:
        FpipeError: the optimizer cannot be had as a pure function, or refuses a hyperparameter.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
        >>> stages = [lambda w, x: x * w, lambda w, x: x + w]
        >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
        >>> trainer = fpipe.train(pipe, torch.optim.SGD, lr=0.5, max_norm=1.0)
        >>> params = [torch.tensor(2.0), torch.tensor(0.0)]
        >>> state = trainer.init(params)
        >>> loss, params, state, norm = trainer.step(params, state, torch.ones(4), lr=0.1)
        >>> loss.item(), norm.item(), params[1].item() < 0, int(state.steps)
        (2.0, 1.4142135381698608, True, 1)
    """
    check_is_pipeline("pipe", pipe, "fpipe.train")
    argnums = engine_of(pipe).definition.argnums
    if argnums != "params":
        raise FpipeError(
            f"pipe has argnums={argnums!r}: fpipe.train takes one whose gradients "
            "are by the parameters alone"
        )
    if max_norm is not None:
        clip_by_global_norm([], max_norm)  # refuses what is no bound
    check_choice("clip", clip, CLIPS)
    rule = _rule(pipe, optimizer, groups, hyperparameters)
    if donate and not isinstance(rule, LeafByLeaf):
        raise FpipeError(
            "donate=True with a pair of functions, which make parameters and state anew: pass a "
            "class of torch.optim"
        )
    return Trainer(pipe, rule, max_norm, clip, donate=donate)


def _rule(pipe: Pipeline, optimizer: Any, groups: Groups | None, hyper: dict[str, Any]) -> Rule:
    if isinstance(optimizer, tuple) and len(optimizer) == 2 and all(map(callable, optimizer)):
        refused = [*hyper, *(["groups"] if groups is not None else [])]
        if refused:
            raise FpipeError(
                f"{', '.join(refused)}: an optimizer that is a pair of functions has "
                "hyperparameters of its own"
            )
        return PairOfFunctions(*optimizer)
    while hasattr(optimizer, "func") and hasattr(optimizer, "keywords"):
        hyper = optimizer.keywords | hyper
        optimizer = optimizer.func

    definition = engine_of(pipe).definition
    updates = Updates(optimizer, hyper, kernels_of(definition.compile))

    def trained(spec: optree.PyTreeSpec) -> list[bool]:
        """Transforms put other things beside parameters, which the caller's have not."""
        choice = replace(definition.trainable, within=())
        if definition.function:
            return list(choice.flags([spec], shared=True)[0])
        flags = choice.flags(spec.children(), shared=False)
        return [flag for part in flags for flag in part]

    return LeafByLeaf(updates, read_groups(groups), trained)


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
