"""Values of a step, and the tasks that compute them: one kernel call of a rank each.

A name is local to one stage and one microbatch. Following it through the placeholders of stages
leads to its origin: a leaf of the parameters or of the batch, a constant, or a kernel's output.
A value that stages only pass on is thus sent straight from where it was made to where it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fpipe.graph.joint import (
    BatchLeaf,
    Constant,
    Key,
    Param,
    Seed,
    StateLeaf,
    SumSoFar,
    Upstream,
)
from fpipe.inputs.signature import Spec
from fpipe.pieces.boxed import Boxed
from fpipe.pieces.piece import PREPARE
from fpipe.plan.codes import StageCode
from fpipe.schedule import Action, Op

Codes = Callable[[int, int], StageCode]
"""From stage and microbatch to the code that runs it."""


@dataclass(frozen=True, slots=True)
class ParamValue:
    """A leaf of a stage's parameters, or of the state, which comes with them."""

    stage: int
    leaf: int


@dataclass(frozen=True, slots=True)
class BatchValue:
    """A leaf of a microbatch."""

    microbatch: int
    leaf: int


@dataclass(frozen=True, slots=True)
class ConstantValue:
    """A tensor that a stage function closes over, by its ``id``."""

    address: int


@dataclass(frozen=True, slots=True)
class KeyValue:
    """The key of a microbatch, with the number of a stage or of a draw folded in; -1 for none."""

    microbatch: int
    number: int


@dataclass(frozen=True, slots=True)
class SeedValue:
    """The weight of a microbatch's loss."""

    microbatch: int


@dataclass(frozen=True, slots=True)
class MomentsValue:
    """The optimizer's state of a leaf of a stage's parameters."""

    stage: int
    leaf: int


@dataclass(frozen=True, slots=True)
class MoveValue:
    """The optimizer's step of one leaf, as a function."""


@dataclass(frozen=True, order=True, slots=True)
class SumValue:
    """The running sum of a gradient, or the gradient of one microbatch by itself.

    Attributes:
        stage: whose contribution it is.
        leaf: of the stage's parameters, or of the batch.
        microbatch: -1 for the sum.
        argument: ``"params"`` or ``"batch"``.
    """

    stage: int
    leaf: int
    microbatch: int = -1
    argument: str = "params"


@dataclass(frozen=True, slots=True)
class Computed:
    """An output of one of a stage's kernels.

    Attributes:
        stage: whose kernel.
        microbatch: what it was computed on; for what no microbatch goes into, one that reads it.
        name: in the code of that stage and microbatch.
    """

    stage: int
    microbatch: int
    name: str


Value = (
    ParamValue
    | BatchValue
    | ConstantValue
    | KeyValue
    | SeedValue
    | MomentsValue
    | MoveValue
    | SumValue
    | Computed
)


class Resolver:
    """Follows names to values."""

    def __init__(self, codes: Codes) -> None:
        self._codes = codes
        self._known: dict[tuple[int, int, str], Value] = {}
        self._preparing: dict[Hashable, int] = {}

    def follow_states(self, stages: int, microbatches: int) -> None:
        """Know the states that microbatches begin with, each from the one before it.

        Asked for the last first, one that is only handed on would be followed through all of them.
        """
        for microbatch in range(microbatches):
            for stage in range(stages):
                for name, source in self._codes(stage, microbatch).sources.items():
                    if isinstance(source, StateLeaf):
                        self(stage, microbatch, name)

    def __call__(self, stage: int, microbatch: int, name: str) -> Value:
        """The value that `name` stands for in a stage's code for a microbatch."""
        key = (stage, microbatch, name)
        if key not in self._known:
            self._known[key] = self._resolve(stage, microbatch, name)
        return self._known[key]

    def _resolve(self, stage: int, microbatch: int, name: str) -> Value:
        code = self._codes(stage, microbatch)
        match code.sources.get(name):
            case Param(leaf):
                return ParamValue(stage, leaf)
            case BatchLeaf(leaf):
                return BatchValue(microbatch, leaf)
            case StateLeaf(leaf):
                if microbatch == 0:
                    return ParamValue(stage, leaf)
                before = self._codes(stage, microbatch - 1)
                return self(stage, microbatch - 1, before.updates[leaf])
            case Constant(number):
                return ConstantValue(id(code.constants[number]))
            case Key(of_stage, draw):
                return KeyValue(microbatch, stage if of_stage else draw)
            case Seed():
                return SeedValue(microbatch)
            case SumSoFar(leaf):
                return SumValue(stage, leaf)
            case Upstream(producer, leaf):
                return self(producer, microbatch, self._codes(producer, microbatch).outputs[leaf])
        if name in code.prepared:
            return Computed(stage, self._prepares(stage, microbatch), name)
        if name in code.by_cotangent:
            leaf, reader = code.by_cotangent[name]
            returned = self._codes(reader, microbatch).input_grads[Upstream(stage, leaf)]
            return self(reader, microbatch, returned)
        return Computed(stage, microbatch, name)

    def _prepares(self, stage: int, microbatch: int) -> int:
        """The microbatch that stands for all that read the same prepared values of a stage.

        Those whose code differs, by their number of rows or in what is kept, read the same if they
        are computed alike from the same values.
        """
        piece = self._codes(stage, microbatch).pieces[PREPARE]
        inputs = tuple(self(stage, microbatch, name) for name in piece.inputs)
        key = stage, piece.fingerprint, piece.outputs, inputs
        return self._preparing.setdefault(key, microbatch)


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


def kernel_task(
    kernel: Boxed,
    action: Action,
    inputs: tuple[Value, ...],
    outputs: tuple[Computed, ...],
    specs: tuple[Spec, ...],
    needed: int = 0,
) -> Task:
    """The task that runs a kernel which need not be compiled, and needs so many bytes in all."""
    return Task(action, lambda: kernel, inputs, outputs, specs, lambda handed: needed)


def update_of(action: Action) -> Task:
    """The place of an UPDATE, which computes nothing yet."""
    return kernel_task(_nothing, action, (), (), ())


def _nothing(values: list[Tensor]) -> list[Tensor]:
    return []


def adding(
    total: Computed,
    parts: tuple[Value, ...],
    spec: Spec,
    fold: Callable[[Tensor], Tensor] | None = None,
) -> Task:
    """The task that adds up parts of a gradient in order, and keeps what `fold` does of them."""
    kept = spec
    if fold is not None:
        folded = fold(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
        kept = Spec(tuple(folded.shape), folded.dtype)
    # A new tensor each time, beside the one before it.
    needed = spec.nbytes * min(2, len(parts) - (fold is None))
    action = Action(total.stage, Op.REDUCE_GRAD, None)
    return kernel_task(partial(_add_up, fold), action, parts, (total,), (kept,), needed)


def _add_up(fold: Callable[[Tensor], Tensor] | None, values: list[Tensor]) -> list[Tensor]:
    """A kernel: what is kept of the sum of all inputs, from left to right."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    values.clear()
    return [total if fold is None else fold(total)]
