"""The three ways in which a trainer's step goes: they come to the same numbers.

    plain      loss, grads ──► norm ──► clip ──► update            new parameters and state
    donated    loss, grads ──► norm ──► clip ──► update, leaf by leaf, in place
    within     each stage is updated where the schedule says so; the norm comes after that, and
               where it is too great, updates are made again, of clipped gradients

Where the loss is scaled, gradients are divided by the scale before all else. A step whose norm is
not finite may be left out: parameters and state stay as they are, but for the scale.

A donated step writes into parameters and a state that the caller has given up. Two leaves in the
same memory would be updated twice, so they are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.dtensors import local
from fpipe.errors import FpipeError
from fpipe.execute.gathering import home_of
from fpipe.inputs.ambient import is_within
from fpipe.inputs.params import Move
from fpipe.inputs.signature import extent_of
from fpipe.parameters.holding import names_of
from fpipe.pipelines import Pipeline, engine_of
from fpipe.spec.convention import DEFERRED, PLAIN, STATE, scaled
from fpipe.spec.definition import Definition
from fpipe.torch_internals import innermost_value, is_transformed
from fpipe.training.loss_scaling import LossScaling
from fpipe.training.train_step import (
    TrainState,
    TrainStep,
    TrainStepAux,
    TrainStepState,
    TrainStepStateAux,
)
from fpipe.training.trees import LeafByLeaf, LeafSteps, Rule
from fpipe.transforms.norms import global_norm, scale_of

Clip = Literal["validate", "wait"]


class Settings(NamedTuple):
    """The settings of a trainer.

    Attributes:
        pipe: computes loss and gradients.
        rule: makes parameters and state of the next step.
        max_norm: what gradients are clipped to; None where nobody asks for their norm.
        clip: as for `fpipe.train`.
        donate: as for `fpipe.train`.
        skips: leaves out steps that are not finite.
        averages: the state has averages of the parameters.
        scaling: of the loss; None for none.
    """

    pipe: Pipeline
    rule: Rule
    max_norm: float | None
    clip: Clip = "validate"
    donate: bool = False
    skips: bool = False
    averages: bool = False
    scaling: LossScaling | None = None

    @property
    def definition(self) -> Definition:
        """The definition of the pipeline."""
        return engine_of(self.pipe).definition

    def rule_within(self, hyper: Sequence[Any]) -> LeafByLeaf | None:
        """The rule, if stages can be updated within the step; None if all are updated after it.

        All ranks find the same: the parameters of some say nothing about it.
        """
        definition = self.definition
        plain = (
            self.clip != "wait"
            and not self.donate
            and definition.convention in (PLAIN, STATE, DEFERRED)
            and definition.reduction != "weighted"
            and definition.devices is None
            and not definition.loss_shape
        )
        if not plain or is_within() or _is_differentiated(hyper):
            return None
        return self.rule if isinstance(self.rule, LeafByLeaf) else None


class Call(NamedTuple):
    """The arguments of a step.

    Attributes:
        params: as for `Trainer.step`.
        state: as for `Trainer.step`.
        arguments: as for `Trainer.step`.
        key: as for `Trainer.step`.
        named: of the arguments, those that came by name.
        hyper: hyperparameters of this step.
    """

    params: Any
    state: TrainState
    arguments: Sequence[Any]
    key: Tensor | None
    named: Mapping[str, Any]
    hyper: Mapping[str, Any]

    @property
    def scale(self) -> float:
        """The factor of the loss."""
        return 1.0 if self.state.scale is None else float(self.state.scale.scale)


def step(settings: Settings, call: Call) -> Any:
    """Take the step of `Trainer.step`."""
    _check_scale(settings, call)
    if settings.donate:
        return _donated(settings, call)
    rule = settings.rule_within(list(call.hyper.values()))
    return _plain(settings, call) if rule is None else _within(settings, rule, call)


def _plain(settings: Settings, call: Call) -> Any:
    """A step that updates all stages at its end."""
    params, state = call.params, call.state
    result = _gradients(settings, call)
    results, grads, norm = _without_grads(settings, result), result.grads, None
    if settings.scaling is not None:
        grads = scaled(grads, torch.tensor(1 / call.scale, dtype=torch.float64))
    if settings.max_norm is not None:
        norm = _norm(settings.pipe, grads)
        if _is_left_out(settings, norm):
            after = _after(settings, state, state.moments, finite=False)
            return _returned(settings, results, params, after, norm)
        grads = scaled(grads, scale_of(norm, settings.max_norm))
    tracked = _is_differentiated([result.loss, *call.hyper.values()])
    with torch.set_grad_enabled(torch.is_grad_enabled() and tracked):
        count = number_of(state.steps)
        moved, moments = settings.rule.update(grads, state.moments, params, count, call.hyper)
    return _returned(settings, results, moved, _after(settings, state, moments), norm)


def _donated(settings: Settings, call: Call) -> Any:
    """A step that writes into parameters and state, when all gradients are there."""
    rule, engine, params, state = settings.rule, engine_of(settings.pipe), call.params, call.state
    assert isinstance(rule, LeafByLeaf)

    def read() -> LeafSteps:
        check_donated(params, call.hyper.values())
        before = number_of(state.steps)
        return rule.step(state.moments, params, before, call.hyper, in_place=True)

    with torch.no_grad():
        steps = engine.validated("step", read)
        result = _gradients(settings, call)
        results, grads = _without_grads(settings, result), [result.grads]
        del result  # which has the gradients
        scale, norm, skips = None, None, False
        if settings.max_norm is not None:
            norm = _norm(settings.pipe, grads[0]) / call.scale
            skips = _is_left_out(settings, norm)
            clip = scale_of(norm, settings.max_norm) / call.scale
            scale = None if bool((clip == 1).all()) else clip
        if not skips:
            steps.write_all(grads, scale)
        after = _after(settings, state, state.moments, finite=not skips)
        state.steps.copy_(after.steps)
        if state.scale is not None and after.scale is not None:
            for old, new in zip(state.scale, after.scale, strict=True):
                old.copy_(new)
        return _returned(settings, results, params, state, norm)


def _within(settings: Settings, rule: LeafByLeaf, call: Call) -> Any:
    """A step in which each stage is updated as soon as its gradients are whole.

    The norm is known only when those of all ranks are. Where it turns out to be too great, the
    updates are made again, of clipped gradients.
    """
    params, state, scale = call.params, call.state, call.scale
    clips = settings.max_norm is not None
    steps: list[LeafSteps] = []

    def read() -> tuple[Sequence[Any], Move]:
        count = number_of(state.steps)
        step = rule.step(
            state.moments, params, count, call.hyper, squares=clips, unscale=1 / call.scale
        )
        steps.append(step)
        return step.states, step.move

    with torch.no_grad():
        outcome = engine_of(settings.pipe).run_updating(
            read,
            params,
            *call.arguments,
            key=call.key,
            clips=clips,
            scale=scale,
            **call.named,
        )
        [step] = steps
        moved = outcome.updates()
        norm, grads = outcome.norm, None
        if outcome.leaves_gradients() or (clips and norm is None):
            grads = outcome.take_grads()
            step.move_others(moved, grads)
        if settings.max_norm is not None:
            if norm is None:  # of DTensors, whose parts are counted over their mesh
                norm = global_norm(grads, pipe=settings.pipe) / scale
            norm = norm.to(home_of(step.leaves))
            if _is_left_out(settings, norm):
                after = _after(settings, state, state.moments, finite=False)
                return _returned(settings, outcome.without_grads(), params, after, norm)
            clip = scale_of(norm, settings.max_norm)
            if not bool(clip == 1):
                grads = scaled(outcome.take_grads() if grads is None else grads, clip / scale)
                update = rule.update(grads, state.moments, params, step.before, call.hyper)
                after = _after(settings, state, update[1])
                return _returned(settings, outcome.without_grads(), update[0], after, norm)
        values, moments = step.trees(moved)
        after = _after(settings, state, moments)
        return _returned(settings, outcome.without_grads(), values, after, norm)


def _gradients(settings: Settings, call: Call) -> Any:
    """The result of `Pipeline.step`, with the gradients of the scaled loss."""
    pipe = settings.pipe
    if settings.scaling is None:
        return pipe.step(call.params, *call.arguments, key=call.key, **call.named)
    engine = engine_of(pipe)
    arguments, key = engine.in_order("step", tuple(call.arguments), call.key, call.named)
    return engine.step(call.params, *arguments, key=key, scale=call.scale)


def _check_scale(settings: Settings, call: Call) -> None:
    """Refuse to scale the loss where that cannot be."""
    if (settings.scaling is None) != (call.state.scale is None):
        which = "without" if call.state.scale is None else "with"
        raise FpipeError(
            f"state is that of a trainer {which} loss_scale=: make one by trainer.init(params), or "
            "read it by trainer.load"
        )
    if settings.scaling is not None and is_within():
        raise FpipeError(
            "loss_scale= within a transform of torch.func: make the trainer without it"
        )


def _is_left_out(settings: Settings, norm: Tensor) -> bool:
    """Whether parameters and state stay as they are; all ranks have the same norm."""
    if not settings.skips:
        return False
    if is_transformed(norm):
        raise FpipeError(
            "skip_nonfinite=True within a transform of torch.func, in which no step can be "
            "left out: make the trainer without it"
        )
    return not bool(norm.isfinite())


def _after(
    settings: Settings, state: TrainState, moments: Any, *, finite: bool = True
) -> TrainState:
    """The state after a step; one that is not finite, and so left out, changes the scale alone."""
    scale = state.scale
    if settings.scaling is not None and scale is not None:
        scale = settings.scaling.after(scale, finite=finite)
    return TrainState(state.steps + 1, moments, scale) if finite else state._replace(scale=scale)


def _norm(pipe: Pipeline, grads: Any) -> Tensor:
    """The norm of the gradients; of an ensemble's, one for each member."""
    if engine_of(pipe).definition.alone is None:
        return global_norm(grads, pipe=pipe)
    members = len(pytree.flatten(grads)[0][0])
    by_member = (pytree.tree_map(lambda g, m=m: g[m], grads) for m in range(members))
    return torch.stack([global_norm(member_grads, pipe=pipe) for member_grads in by_member])


def _without_grads(settings: Settings, result: Any) -> tuple[Any, Any, Any]:
    """The loss, the model's state and aux; None for what is not declared."""
    kind = settings.definition
    state = result.state if kind.has_state else None
    return result.loss, state, result.aux if kind.has_aux else None


def _returned(
    settings: Settings,
    results: tuple[Any, Any, Any],
    params: Any,
    state: TrainState,
    norm: Tensor | None,
) -> Any:
    """The named tuple of all that the pipeline declares."""
    kind, (loss, model_state, aux) = settings.definition, results
    common = (loss, params, state, norm)
    if kind.has_state and kind.has_aux:
        return TrainStepStateAux(*common, model_state, aux)
    if kind.has_state:
        return TrainStepState(*common, model_state)
    return TrainStepAux(*common, aux) if kind.has_aux else TrainStep(*common)


def number_of(count: Tensor) -> int:
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


def check_donated(params: Any, hyper: Iterable[Any]) -> None:
    """Refuse to write where a write would be wrong."""
    leaves, spec = pytree.flatten(params)
    watched = [value for value in (*leaves, *hyper) if isinstance(value, Tensor)]
    if is_within() or any(map(is_transformed, watched)):
        raise FpipeError(
            "donate=True within a transform of torch.func: it would write into what the transform "
            "reads; make the trainer without donate"
        )
    ends: list[tuple[int, int, int]] = []
    for place, leaf in enumerate(leaves):
        tensor = local(leaf)
        if isinstance(tensor, Tensor) and not tensor.is_meta and tensor.numel():
            start, end = extent_of(tensor)
            ends.append((start, end, place))
    ends.sort()
    for (_, end, first), (start, _, second) in pairwise(ends):
        if start < end:
            names = names_of(spec)
            raise FpipeError(
                f"donate=True: parameters {names[first]!r} and {names[second]!r} lie in the same "
                "memory, which the step would update twice: clone one of them, or let one stage or "
                "function read it twice"
            )


def clones(params: Any, state: TrainState) -> tuple[Any, TrainState]:
    """Parameters and state in memory of their own, which no later step writes into."""
    copied: tuple[Any, TrainState] = pytree.tree_map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, (params, state)
    )
    return copied
