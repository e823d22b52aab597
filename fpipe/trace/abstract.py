"""Abstract arguments: fake tensors in place of those that a step will be called with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fpipe.graph.joint import Source
from fpipe.inputs.ambient import current
from fpipe.inputs.signature import TreeShape, device_of_keys


class Places:
    """Where stages are traced.

    Args:
        devices: of each stage, None for those of their arguments.

    Attributes:
        mode: in which their tensors are fake.
    """

    def __init__(self, devices: Sequence[torch.device] | None) -> None:
        self._devices = devices
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        if devices is not None and len(set(devices)) > 1:
            # Its cache takes "cuda" for the device that was current when the same was asked first.
            self.mode.cache_enabled = False

    def begin(self) -> None:
        """A trace begins; what ended the one before may have come in the midst of an operation."""
        self.mode.in_kernel_invocation = False

    def device(self, index: int) -> torch.device | None:
        """That of a stage."""
        return None if self._devices is None else self._devices[index]

    def at(self, index: int) -> AbstractContextManager[Any]:
        """Within it the current device is that of a stage: it may ask for ``"cuda"`` alone."""
        return current(self.device(index))

    def bring(self, values: tuple[Tensor, ...], index: int) -> tuple[Tensor, ...]:
        """The same fake tensors on the device of a stage."""
        device = self.device(index)
        if device is None:
            return values
        with self.mode:
            return tuple(value.to(device) for value in values)


@dataclass(frozen=True)
class Abstract:
    """A pytree of fake tensors, flat."""

    values: tuple[Tensor, ...]
    spec: optree.PyTreeSpec

    @classmethod
    def of(cls, shape: TreeShape, mode: FakeTensorMode) -> Abstract:
        """Fake tensors of these shapes."""
        with mode:
            values = tuple(
                torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=leaf.device)
                for leaf in shape.leaves
            )
        return cls(values, shape.spec)

    @property
    def key(self) -> TreeShape:
        """Equal for trees that a stage cannot tell apart when it is traced."""
        return TreeShape.of(self.spec, self.values)


@dataclass(frozen=True)
class Leaves:
    """Flat abstract arguments of a stage function.

    Attributes:
        values: fake tensors.
        sources: where each comes from.
        paths: how a user would write each, for messages.
        differentiable: whether each gets a gradient.
        arguments: where the stage's input comes from and what it is, for messages.
        called: how its user's function is called, for messages; empty if there is none.
    """

    values: tuple[Tensor, ...]
    sources: tuple[Source, ...]
    paths: tuple[str, ...]
    differentiable: tuple[bool, ...]
    arguments: str
    called: str = ""

    @property
    def places(self) -> dict[Source, list[int]]:
        """For each source that gets a gradient, the arguments that it comes in as."""
        places: dict[Source, list[int]] = {}
        for index, source in enumerate(self.sources):
            if self.differentiable[index]:
                places.setdefault(source, []).append(index)
        return places


def abstract_key(batch: Abstract, mode: FakeTensorMode) -> Tensor:
    """A fake key, on the device of the microbatch."""
    with mode:
        return torch.empty(2, dtype=torch.int64, device=device_of_keys(batch.values))
