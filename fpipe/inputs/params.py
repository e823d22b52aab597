"""The caller's parameters, flat."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fpipe import pytree
from fpipe.errors import BatchError, a_type
from fpipe.inputs.signature import TreeShape


class Moved(NamedTuple):
    """A parameter after an optimizer's step.

    Attributes:
        value: the parameter.
        moments: the optimizer's state of it; None where it has none.
        square: of the norm of its gradient, float64, without dimensions; None if nobody asks.
    """

    value: Tensor
    moments: Any
    square: Tensor | None


Move = Callable[[int, Tensor, Tensor, Any], Moved]
"""From the place of a leaf among those of the parameters, the leaf, its gradient and its moments to
what the optimizer makes of them."""


class Updating(NamedTuple):
    """Parameters with what updates them, as a step with an optimizer is called.

    Attributes:
        params: as the stages take them.
        moments: of each of the caller's leaves, in order.
        move: the optimizer's step of one leaf.
    """

    params: Any
    moments: Sequence[Any]
    move: Move


@dataclass(frozen=True)
class Parameters:
    """Parameters by stage, free of autograd history.

    Attributes:
        spec: structure of the whole.
        specs: structure of each stage's part.
        stages: leaves of each stage.
        shared: every stage numbers the leaves of one tree, which is the whole.
        updating: what updates them, None where nothing does.
    """

    spec: optree.PyTreeSpec
    specs: tuple[optree.PyTreeSpec, ...]
    stages: tuple[tuple[Tensor, ...], ...]
    shared: bool = False
    updating: Updating | None = field(default=None, repr=False, compare=False)

    def place(self, stage: int, leaf: int) -> int:
        """The place of a stage's leaf among all of them."""
        return leaf if self.shared else leaf + self._starts[stage]

    def state_leaves(self, *, has_state: bool) -> frozenset[int]:
        """The leaves that are a state, which comes behind the parameters."""
        if not has_state:
            return frozenset()
        return frozenset(range(self.spec.children()[0].num_leaves, self.spec.num_leaves))

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """The place of the first leaf of each stage."""
        return (0, *accumulate(map(len, self.stages)))

    @classmethod
    def whole(cls, params: Any, num_stages: int) -> Parameters:
        """Flatten one pytree, of which each stage may read any leaf.

        Raises:
            BatchError: a leaf is no dense tensor.
        """
        flat, spec = pytree.tensors("params", params, "close over other values instead")
        stages = (tuple(flat),) * num_stages
        return cls(spec, (spec,) * num_stages, stages, shared=True)

    @classmethod
    def with_state(cls, params: Any, num_stages: int) -> Parameters:
        """`whole`, of the pair of parameters and state.

        The state that a stage leaves to the next microbatch is contiguous, so the first one is,
        too.

        Raises:
            BatchError: a leaf is no dense tensor.
        """
        try:
            read = cls.whole(params, num_stages)
        except BatchError:
            for name, tree in zip(("params", "state"), params, strict=True):
                pytree.tensors(name, tree, "close over other values instead")
            raise
        flat = list(read.stages[0])
        count = read.spec.children()[0].num_leaves
        flat[count:] = [leaf.contiguous() for leaf in flat[count:]]
        return replace(read, stages=(tuple(flat),) * num_stages)

    @classmethod
    def read(cls, params: Any, num_stages: int) -> Parameters:
        """Flatten `params`, a sequence with one pytree per stage.

        Raises:
            BatchError: `params` is no such sequence, or a leaf is no dense tensor.
        """
        check_parts("params", params, num_stages)
        flat, spec = pytree.tensors(
            "params", params, "bind other values to the stage with functools.partial"
        )
        specs = tuple(spec.children())
        stages, start = [], 0
        for stage_spec in specs:
            stages.append(tuple(flat[start : start + stage_spec.num_leaves]))
            start += stage_spec.num_leaves
        return cls(spec, specs, tuple(stages))

    def move(self, stage: int, leaf: int, value: Tensor, gradient: Tensor, moments: Any) -> Moved:
        """The optimizer's step of a stage's leaf."""
        assert self.updating is not None
        return self.updating.move(self.place(stage, leaf), value, gradient, moments)

    def shapes(self, device: torch.device | None = None) -> tuple[TreeShape, ...]:
        """Those of each stage's leaves; on `device` if it is given."""

        count = 1 if self.shared else len(self.stages)
        shapes = tuple(map(TreeShape.of, self.specs[:count], self.stages[:count]))
        if device is not None:
            shapes = tuple([shape.on(device) for shape in shapes])
        # To describe a thousand leaves takes milliseconds.
        return shapes * len(self.stages) if self.shared else shapes

    def with_empty_on(self, devices: Sequence[torch.device]) -> Parameters:
        """The same with leaves that have no elements on the device of their stage.

        They say a size alone, as an ensemble's number of members, and are made without knowing
        where stages run.
        """
        if all(leaf.numel() for stage in self.stages for leaf in stage):
            return self
        stages = tuple(
            tuple(leaf if leaf.numel() or leaf.is_meta else leaf.to(device) for leaf in stage)
            for stage, device in zip(self.stages, devices, strict=True)
        )
        return replace(self, stages=stages)


def check_parts(name: str, params: Any, num_stages: int) -> None:
    """Refuse what has not one part per stage.

    Raises:
        BatchError: names the argument by `name`.
    """
    if not isinstance(params, list | tuple) or len(params) != num_stages:
        size = f" of {len(params)}" if isinstance(params, list | tuple | dict) else ""
        raise BatchError(
            f"{name} is {a_type(params)}{size}: it must be a list or tuple of "
            f"{num_stages} pytrees, one per stage (None for a stage without parameters)"
        )


def keep(params: Any, stages: Collection[int]) -> Any:
    """`params` with None in place of every stage's part but those of `stages`.

    Anything but a list or tuple is returned as it is: its reader refuses it.
    """
    if not isinstance(params, list | tuple):
        return params
    return contained([tree if n in stages else None for n, tree in enumerate(params)], params)


def contained(parts: Sequence[Any], like: Any) -> Any:
    """`parts` in a container of the same kind as `like`: a list, a tuple or a named tuple."""
    if isinstance(like, list):
        return list(parts)
    make: Callable[[Sequence[Any]], Any] = getattr(like, "_make", tuple)
    return make(parts)
