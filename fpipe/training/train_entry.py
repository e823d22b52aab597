"""`fpipe.train`: a pipeline and an optimizer as a trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from os import PathLike
from typing import Any, get_args

import optree
import torch

from fpipe.errors import FpipeError, a_type, check_choice, check_flags
from fpipe.inputs.host_memory import Keep, MappedFolder, on_the_cpu
from fpipe.pipelines import Pipeline, check_is_pipeline, engine_of
from fpipe.training.compiled import kernels_of
from fpipe.training.loss_scaling import read_loss_scale
from fpipe.training.stepping import Clip, Settings
from fpipe.training.trainer import Trainer
from fpipe.training.trees import Groups, LeafByLeaf, PairOfFunctions, Rule, read_groups
from fpipe.training.updates import Updates
from fpipe.transforms.norms import clip_by_global_norm

Optimizer = (
    type[torch.optim.Optimizer] | tuple[Callable[[Any], Any], Callable[[Any, Any, Any], Any]]
)


def train(
    pipe: Pipeline,
    optimizer: Optimizer,
    *,
    groups: Groups | None = None,
    max_norm: float | None = None,
    clip: Clip = "validate",
    donate: bool = False,
    ema: float | None = None,
    skip_nonfinite: bool = False,
    offload: str | PathLike[str] | None = None,
    loss_scale: str | torch.amp.GradScaler | None = None,
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
        ema: keep an exponential moving average of each parameter that is trained, of which this
            share stays in each step, such as 0.999. It begins with the parameters of
            `Trainer.init`, is part of the state and saved with it; `Trainer.averages` returns it.
        skip_nonfinite: a step whose norm is infinite or NaN changes neither parameters nor state,
            and does not count, on all ranks alike. `TrainStep.norm` is there then, also without
            `max_norm`. A model's state is as the step has left it.
        offload: where the state lives, if not beside the parameters. ``"cpu"``: in the CPU's
            memory, page-locked where there is CUDA; each parameter is copied there with its
            gradient, updated, and copied back (ZeRO-Offload, arXiv 2101.06840). A path: in
            memory-mapped files in that directory, on a disk, which the system reads and writes as
            it has memory; they have no names, and are gone with the process, so that nothing is
            left of one that is killed. With ``donate=True`` they are written in place, and else
            made anew in each step. `Trainer.save` writes such a state as any other.
        loss_scale: ``"dynamic"`` multiplies the loss, within the backward, with a scale that keeps
            gradients of float16 from vanishing, and divides them by it before all else, by the rule
            of `torch.amp.GradScaler` (Micikevicius et al., 2018): a step whose gradients are not
            finite is left out, as by `skip_nonfinite`, and halves the scale; after 2000 others in a
            row it doubles. Scale and counter are ``state.scale``, and saved with it. A
            ``torch.amp.GradScaler`` says other numbers, and is only read. Parameters are float32,
            and stages compute in float16 by ``mp_policy``.
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
    check_choice("clip", clip, get_args(Clip))
    check_flags(donate=donate, skip_nonfinite=skip_nonfinite)
    scaling = read_loss_scale(loss_scale)
    skips = skip_nonfinite or scaling is not None
    if skips and max_norm is None:
        max_norm = inf
    rule = _rule(pipe, optimizer, groups, hyperparameters, ema, offload)
    if donate and not isinstance(rule, LeafByLeaf):
        raise FpipeError(
            "donate=True with a pair of functions, which make parameters and state anew: pass a "
            "class of torch.optim"
        )
    averages = ema is not None
    return Trainer(Settings(pipe, rule, max_norm, clip, donate, skips, averages, scaling))


def _rule(
    pipe: Pipeline,
    optimizer: Any,
    groups: Groups | None,
    hyper: dict[str, Any],
    ema: float | None,
    offload: str | PathLike[str] | None,
) -> Rule:
    if ema is not None and not (isinstance(ema, float) and 0 <= ema < 1):
        raise FpipeError(
            f"ema={ema!r:.60} must be a number from 0 to 1, the share of the average that stays in "
            "each step, such as 0.999, or None"
        )
    if isinstance(optimizer, tuple) and len(optimizer) == 2 and all(map(callable, optimizer)):
        refused = [*hyper, *(["groups"] if groups is not None else [])]
        refused += [] if ema is None else ["ema"]
        refused += [] if offload is None else ["offload"]
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
    updates = Updates(optimizer, hyper, kernels_of(definition.compile), ema)

    def trained(spec: optree.PyTreeSpec) -> list[bool]:
        """Transforms put other things beside parameters, which the caller's have not."""
        choice = replace(definition.trainable, within=())
        if definition.function:
            return list(choice.flags([spec], shared=True)[0])
        flags = choice.flags(spec.children(), shared=False)
        return [flag for stage_flags in flags for flag in stage_flags]

    return LeafByLeaf(updates, read_groups(groups), trained, _keeping(offload))


def _keeping(offload: str | PathLike[str] | None) -> Keep:
    """The function that puts a state where the user's ``offload`` says."""
    if offload is None:
        return None
    if not isinstance(offload, str | PathLike):
        raise FpipeError(
            f'offload={offload!r:.60} is {a_type(offload)}: it must be "cpu", a path of a '
            "directory, or None"
        )
    if offload == "cpu":
        return partial(on_the_cpu, pin=torch.cuda.is_available())
    return MappedFolder(offload).hold
