"""Results of a training step: a named tuple with a field for each thing that was declared."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Step(NamedTuple):
    """The result of a training step.

    Attributes:
        loss: scalar tensor, without autograd history.
        grads: the structure of the parameters, with a gradient for each floating-point leaf (zeros
            where the loss does not depend on it) and None for each leaf that cannot have one.
    """

    loss: Tensor
    grads: Any


class StepAux(NamedTuple):
    """The result of a training step where ``has_aux=True`` was declared.

    Attributes:
        loss: as in `Step`.
        grads: as in `Step`.
        aux: the structure of what the loss function returns as aux, its leaves those of all
            microbatches, merged by the pipeline's ``out_dims``, without autograd history. Over a
            process group a leaf is returned on the rank of the stage that made it (the last stage
            where it depends on no stage, but on parameters or the batch alone), and is None on the
            others: nothing is sent for it, unless microbatches of different sizes make it in
            different stages, the last of which gets them all.
    """

    loss: Tensor
    grads: Any
    aux: Any


class StepState(NamedTuple):
    """The result of a training step where ``has_state=True`` was declared.

    Attributes:
        loss: as in `Step`.
        grads: as in `Step`.
        state: as the last microbatch has left it, in the structure, shapes and dtypes of the state
            that was passed in; over a process group the same on every rank.
    """

    loss: Tensor
    grads: Any
    state: Any


class StepStateAux(NamedTuple):
    """The result of a training step where both were declared.

    Attributes:
        loss: as in `Step`.
        grads: as in `Step`.
        state: as in `StepState`.
        aux: as in `StepAux`.
    """

    loss: Tensor
    grads: Any
    state: Any
    aux: Any


class ForwardAux(NamedTuple):
    """The result of a forward where ``has_aux=True`` was declared for a whole loss function.

    Attributes:
        loss: as in `Step`.
        aux: as in `StepAux`.
    """

    loss: Tensor
    aux: Any
