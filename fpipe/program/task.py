"""A task: one kernel call of a rank, with the values that it reads and computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fpipe.inputs.signature import Spec
from fpipe.pieces.compiler import Boxed
from fpipe.program.values import Computed, Value
from fpipe.schedule import Action, Op


class Task(NamedTuple):
    """One kernel call.

    Attributes:
        action: the action.
        call: makes the boxed callable, compiling it if it is new.
        inputs: values read, in the kernel's order.
        outputs: values computed, in the kernel's order.
        specs: shape and dtype of each output.
        footprint: bytes that a call needs beyond what is held when it starts, given the numbers of
            the inputs that it alone holds.
        constants: tensors among the inputs that a stage function closes over.
    """

    action: Action
    call: Callable[[], Boxed]
    inputs: tuple[Value, ...]
    outputs: tuple[Computed, ...]
    specs: tuple[Spec, ...]
    footprint: Callable[[frozenset[int]], int]
    constants: tuple[Tensor, ...] = ()


NOTHING: Final = Spec((0,), torch.float32)
"""The spec of a value that takes no memory on the rank's device."""


def update_of(action: Action) -> Task:
    """The place of an UPDATE, which computes nothing yet."""
    return Task(action, lambda: _nothing, (), (), (), lambda handed: 0)


def _nothing(values: list[Tensor]) -> list[Tensor]:
    return []


def adding(
    total: Computed,
    parts: tuple[Value, ...],
    spec: Spec,
    fold: Callable[[Tensor], Tensor] | None = None,
) -> Task:
    """The task that adds up parts of a gradient.

    Args:
        total: the sum.
        parts: of it, in order.
        spec: of each part.
        fold: what is kept of the sum; None for all of it.
    """
    kept = spec
    if fold is not None:
        folded = fold(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
        kept = Spec(tuple(folded.shape), folded.dtype)
    # A new tensor each time, beside the one before it.
    needed = spec.nbytes * min(2, len(parts) - (fold is None))
    return Task(
        Action(total.stage, Op.REDUCE_GRAD, None),
        lambda: partial(_add_up, fold),
        parts,
        (total,),
        (kept,),
        lambda handed: needed,
    )


def _add_up(fold: Callable[[Tensor], Tensor] | None, values: list[Tensor]) -> list[Tensor]:
    """A kernel: what is kept of the sum of all inputs, from left to right."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    values.clear()
    return [total if fold is None else fold(total)]
