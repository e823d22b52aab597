"""What a checkpoint is to its reader: names, and tensors that are read one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from fpipe.errors import BatchError

HEAD = ".metadata"
"""The file by which a directory of `torch.distributed.checkpoint` is known."""


class Source(Protocol):
    """Tensors in files, by name."""

    @property
    def names(self) -> frozenset[str]:
        """All that there is."""

    def read(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Read some, and nothing else.

        Args:
            wanted: for each name a meta tensor of the shape and dtype that it must come in.

        Returns:
            Tensors on the CPU, of those dtypes.

        Raises:
            BatchError: one has another shape, or its numbers do not fit.
        """


def check_shape(name: str, found: tuple[int, ...], like: Tensor) -> None:
    """Refuse a tensor of another shape.

    Raises:
        BatchError: names it.
    """
    if found != tuple(like.shape):
        raise BatchError(
            f"the checkpoint's {name!r} has shape {found}, but the model's has "
            f"{tuple(like.shape)}: it is of a model of another configuration"
        )


def check_dtype(name: str, found: torch.dtype, like: Tensor) -> None:
    """Refuse numbers that cannot become the model's: complex ones real, or large integers small.

    Raises:
        BatchError: names the tensor.
    """
    if not torch.can_cast(found, like.dtype) or _wraps(found, like.dtype):
        raise BatchError(
            f"the checkpoint's {name!r} has dtype {found}, but the model's has {like.dtype}, in "
            "which a part of its numbers would be lost: convert the checkpoint"
        )


def _wraps(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether both are of integers, and some of one are none of the other."""
    pair = (found, wanted)
    if torch.bool in pair or any(d.is_floating_point or d.is_complex for d in pair):
        return False
    own, other = torch.iinfo(found), torch.iinfo(wanted)
    return own.min < other.min or own.max > other.max
