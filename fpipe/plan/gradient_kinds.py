"""Which leaves of the parameters have a gradient in a finished run, and the squares of its norm."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.inputs.params import Moved, Parameters
from fpipe.inputs.signature import is_differentiable
from fpipe.plan.plan import Plan
from fpipe.program.interpreter import Run


class Kind(Enum):
    """What the gradient of a leaf is."""

    SUM = "what microbatches have added up"
    ZEROS = "zeros, for the loss does not depend on the leaf"
    NONE = "none here: the leaf is not trained, or belongs to other processes, or to the state"


def kinds_of(plan: Plan, runs: Sequence[Run], params: Parameters) -> list[Kind]:
    """What the gradient of each leaf of `params` is, flat."""
    summed = {
        (0 if params.shared else stage, leaf)
        for run in runs
        for results in [run.program.results]
        for stage, leaf, *_ in (*results.grads, *results.updates)
    }
    alone = len(runs) == len(plan.programs)
    elsewhere = _read_elsewhere(plan, runs) if params.shared and not alone else frozenset()

    def kind(stage: int, index: int, leaf: Tensor) -> Kind:
        if (stage, index) in summed:
            return Kind.SUM
        if index in elsewhere or (stage, index) in plan.frozen or not is_differentiable(leaf):
            return Kind.NONE
        # What nobody reads, and whoever has its data is not here.
        return Kind.NONE if leaf.is_meta else Kind.ZEROS

    return [
        kind(stage, index, leaf)
        for stage, leaves in enumerate(params.stages[:1] if params.shared else params.stages)
        for index, leaf in enumerate(leaves)
    ]


def _read_elsewhere(plan: Plan, runs: Sequence[Run]) -> frozenset[int]:
    """The leaves of shared parameters whose gradient, if they get none here, is with other ranks.

    Those have the gradient, or read what the loss need not depend on.
    """
    here = {leaf for run in runs for _, leaf, _ in run.program.bindings.params}
    return frozenset(
        leaf
        for program in plan.programs
        for leaf in (
            *(leaf for _, leaf, *_ in (*program.results.grads, *program.results.updates)),
            *(leaf for _, leaf, _ in program.bindings.params if leaf not in here),
        )
    )


def updates_of(runs: Sequence[Run], params: Parameters) -> dict[int, Moved]:
    """What the optimizer has made of each leaf that has a sum of gradients, by its place."""
    return {
        params.place(stage, leaf): run.slots[slot]
        for run in runs
        for stage, leaf, slot in run.program.results.updates
    }


class Squares(NamedTuple):
    """The squares of the norm of all gradients.

    Attributes:
        values: to be added up, float64.
        is_wide: whether a gradient has double precision, and so the norm.
    """

    values: Tensor
    is_wide: bool

    @property
    def norm(self) -> Tensor:
        """The norm of all gradients, as `fpipe.global_norm` has it."""
        return self.values.sum().sqrt().to(torch.float64 if self.is_wide else torch.float32)


_ABSENT: Final = -1.0
_WIDE: Final = frozenset({torch.float64, torch.complex128})


def squares_of(plan: Plan, runs: Sequence[Run], params: Parameters) -> Squares:
    """The squares of the gradients of this process."""
    values, is_wide = _by_leaf(plan, runs, params)
    return Squares(values[values != _ABSENT], is_wide)


def squares_to_send(plan: Plan, runs: Sequence[Run], params: Parameters) -> list[float]:
    """Numbers from which ranks make the squares of all of them; as many on each."""
    values, is_wide = _by_leaf(plan, runs, params)
    if not params.shared:
        values = values[values != _ABSENT].sum()[None]
    return [float(is_wide), *values.tolist()]


def count_to_send(params: Parameters) -> int:
    """How many numbers those are."""
    return 1 + (len(params.stages[0]) if params.shared else 1)


def squares_received(rows: Sequence[Sequence[float]], params: Parameters) -> Squares:
    """The squares of the gradients of all ranks, from what each has sent.

    A parameter that several ranks read counts once.
    """
    is_wide = any(row[0] for row in rows)
    columns = list(zip(*(row[1:] for row in rows), strict=True))
    if not params.shared:
        numbers = [sum(column) for column in columns]
    else:
        paths = pytree.paths(params.spec)
        present = ([value for value in column if value != _ABSENT] for column in columns)
        first = {path: own[0] for path, own in zip(paths, present, strict=True) if own}
        # In the order of `fpipe.global_norm`, so that the bits are the same.
        numbers = [first[path] for path in sorted(first)]
    return Squares(torch.tensor(numbers, dtype=torch.float64, device="cpu"), is_wide)


def home_of(leaves: Sequence[Tensor]) -> torch.device:
    """Where the first leaf lies that this process has; those of others lie on the meta device."""
    return next((leaf.device for leaf in leaves if not leaf.is_meta), torch.device("cpu"))


def _by_leaf(plan: Plan, runs: Sequence[Run], params: Parameters) -> tuple[Tensor, bool]:
    """The square of each leaf's gradient, and whether any has double precision."""
    updates = updates_of(runs, params)
    stages = params.stages[:1] if params.shared else params.stages
    leaves = [leaf for own in stages for leaf in own]
    values: list[Tensor] = []
    is_wide = False
    device = home_of(leaves)
    for place, (leaf, kind) in enumerate(zip(leaves, kinds_of(plan, runs, params), strict=True)):
        is_wide = is_wide or (kind != Kind.NONE and leaf.dtype in _WIDE)
        if kind == Kind.SUM:
            square = updates[place].square
            assert square is not None
            values.append(square.to(device))
        else:
            number = 0.0 if kind == Kind.ZEROS else _ABSENT
            values.append(torch.tensor(number, dtype=torch.float64, device=device))
    return torch.stack(values) if values else torch.zeros(0, dtype=torch.float64), is_wide
