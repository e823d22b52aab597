"""What a pipeline of a module is made from."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fpipe.convention import called
from fpipe.definition import Definition
from fpipe.errors import StageError, a_type
from fpipe.modules.module_guards import refuse_lost
from fpipe.modules.module_loss import Loss, ModuleLoss, modules_in
from fpipe.modules.module_mode import Mode
from fpipe.nn import state_of
from fpipe.schedule import Schedule
from fpipe.spec.trainable import Trainable


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """``dict(module.named_parameters())`` without autograd history: tied parameters come once."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def declared(
    module: Any,
    loss: Loss | None,
    schedule: Schedule,
    *,
    batch_norm: str = "microbatch",
    is_compiling: bool = False,
    **options: Any,
) -> Definition:
    """The definition of a pipeline of a module that is not cut yet.

    Args:
        module: its parameters that require no gradient are frozen.
        loss: as for `ModuleLoss`.
        schedule: of the pipeline.
        batch_norm: as for `fpipe.pipeline`.
        is_compiling: as for `ModuleLoss`.
        options: other fields of the definition.

    Raises:
        ScheduleError: the schedule cannot run.
        StageError: an argument is wrong.
    """
    if not isinstance(module, nn.Module):
        raise StageError(
            f"module={module!r:.60} is {a_type(module)}: from_module takes a "
            "torch.nn.Module; fpipe.pipeline takes functions"
        )
    refuse_lost(module)
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    definition = Definition(
        stages=(),
        loss=ModuleLoss(module, (), loss),
        function=True,
        trainable=Trainable(None if all(trained.values()) else trained),
        schedule=schedule,
        convention=called(options.get("has_state") is True, batch_norm),
        modes=Mode(*modules_in(module, loss)),
        **options,
    )
    own = ModuleLoss(module, (), loss, definition.returns, is_compiling=is_compiling)
    return replace(definition, loss=own)


def held_by(definition: Definition) -> tuple[Any, ...]:
    """What the module of a definition holds, as a step takes it: parameters, and a state."""
    assert isinstance(definition.loss, ModuleLoss)
    module = definition.loss.module
    params = parameters_of(module)
    return (params, state_of(module)) if definition.has_state else (params,)


def with_cuts(definition: Definition, cuts: Sequence[str] | None) -> Definition:
    """The definition of a pipeline of a module with its cuts.

    Raises:
        StageError: one of them names no submodule.
    """
    assert isinstance(definition.loss, ModuleLoss)
    return replace(definition, loss=definition.loss.with_cuts(cuts))


def copied(definition: Definition, memo: dict[int, Any]) -> Definition:
    """The definition of a pipeline of the copy of a module, as `copy.deepcopy` makes it."""
    loss, modes = copy.deepcopy((definition.loss, definition.modes), memo)
    return replace(definition, loss=loss, modes=modes)


def with_buffers(definition: Definition, buffers: Mapping[str, Tensor]) -> Definition:
    """The definition of a pipeline of a module with other buffers than the module's own."""
    assert isinstance(definition.loss, ModuleLoss)
    return replace(definition, loss=definition.loss.with_buffers(buffers))
