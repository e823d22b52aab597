"""The state and the results of a training step with an optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fpipe.training.loss_scaling import LossScale


class TrainState(NamedTuple):
    """The state of an optimizer, as a value.

    Attributes:
        steps: how many steps were made: an int64 tensor without dimensions, on the CPU.
        moments: in the structure of the parameters, with a dictionary of tensors in place of each
            leaf that is trained, by the names of the optimizer (``exp_avg``), and None for others.
            With a pair of functions it is what ``init`` returns.
        scale: that of the loss, ``(scale, growth_tracker)``; None without ``loss_scale``.
    """

    steps: Tensor
    moments: Any
    scale: LossScale | None = None


class TrainStep(NamedTuple):
    """The result of `Trainer.step`.

    Attributes:
        loss: as in `Step`, of the parameters before the step.
        params: the parameters after it.
        state: the optimizer's state after it.
        norm: the norm of all gradients before they were clipped; None without ``max_norm``.
    """

    loss: Tensor
    params: Any
    state: TrainState
    norm: Tensor | None


class TrainStepState(NamedTuple):
    """The result of `Trainer.step` for a pipeline with ``has_state=True``.

    Attributes:
        loss: as in `TrainStep`.
        params: as in `TrainStep`.
        state: as in `TrainStep`.
        norm: as in `TrainStep`.
        model_state: as the last microbatch has left it.
    """

    loss: Tensor
    params: Any
    state: TrainState
    norm: Tensor | None
    model_state: Any


class TrainStepAux(NamedTuple):
    """The result of `Trainer.step` for a pipeline with ``has_aux=True``.

    Attributes:
        loss: as in `TrainStep`.
        params: as in `TrainStep`.
        state: as in `TrainStep`.
        norm: as in `TrainStep`.
        aux: as in `StepAux`.
    """

    loss: Tensor
    params: Any
    state: TrainState
    norm: Tensor | None
    aux: Any


class TrainStepStateAux(NamedTuple):
    """The result of `Trainer.step` for a pipeline that declares both.

    Attributes:
        loss: as in `TrainStep`.
        params: as in `TrainStep`.
        state: as in `TrainStep`.
        norm: as in `TrainStep`.
        model_state: as in `TrainStepState`.
        aux: as in `StepAux`.
    """

    loss: Tensor
    params: Any
    state: TrainState
    norm: Tensor | None
    model_state: Any
    aux: Any
