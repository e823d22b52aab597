"""Asynchronous collectives of torch and reductions of users: begun now, waited for later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor

from fpipe.errors import StageError, a_type, label_of
from fpipe.spec.data import Group, Reduce

# torch 2.13 has renamed them.
_gather: Final[Callable[..., Any]] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter: Final[Callable[..., Any]] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


class UnderWay:
    """A collective that has begun: it stands in the slot of its result until that is waited for.

    Not ``torch.ops._c10d_functional``, whose waiting corrupts the heap on gloo now and then (torch
    2.13).

    Args:
        work: of torch, to be waited for.
        result: what it fills.
        flat: what it was given, which it reads until it has ended.
    """

    def __init__(self, work: dist.Work, result: Tensor, flat: Tensor) -> None:
        self._work: dist.Work | None = work
        self._result = result
        self._flat: Tensor | None = flat

    def wait(self) -> Tensor:
        """The result, when the collective has ended; who waits again waits for nothing."""
        if self._work is not None:
            self._work.wait()
        self._work = self._flat = None
        return self._result


class ReductionUnderWay:
    """A reduction of the user's that has begun, as `UnderWay` is.

    Args:
        reduce: the user's function, for errors.
        bucket: what it was given.
        result: what it has returned: the sum, or something whose ``wait()`` returns it.
    """

    def __init__(self, reduce: Reduce, bucket: Tensor, result: Any) -> None:
        self._reduce = reduce
        self._bucket = bucket
        self._result = result

    def wait(self) -> Tensor:
        """The sum, when it is there.

        Raises:
            StageError: the function has returned something else than a tensor like the bucket.
        """
        if hasattr(self._result, "wait"):
            self._result = self._result.wait()
        result, like = self._result, self._bucket
        wanted = like.shape[-1:]
        if not isinstance(result, Tensor) or (result.shape, result.dtype) != (wanted, like.dtype):
            got = a_type(result)
            if isinstance(result, Tensor):
                got = f"{result.dtype} of shape {tuple(result.shape)}"
            raise StageError(
                f"reduce={label_of(self._reduce)} has made {got} of a bucket of {like.dtype} of "
                f"shape {tuple(like.shape)}: it must return the sum over the group, of shape "
                f"{tuple(wanted)} in the same dtype, or something whose wait() returns it"
            )
        return result


def all_gather(group: Group, flat: Tensor) -> UnderWay:
    """Begin to put the parts of all replicas together."""
    gathered = flat.new_empty(flat.numel() * group.size)
    work = _gather(gathered, flat, group=group.handle, async_op=True)
    return UnderWay(work, gathered, flat)


def reduce_scatter(group: Group, flat: Tensor) -> UnderWay:
    """Begin to add up this replica's part of what all replicas have."""
    scattered = flat.new_empty(flat.numel() // group.size)
    work = _scatter(scattered, flat, group=group.handle, async_op=True)
    return UnderWay(work, scattered, flat)


def all_reduce(group: Group, flat: Tensor) -> UnderWay:
    """Begin to add up what all replicas have, in place."""
    work = dist.all_reduce(flat, group=group.handle, async_op=True)
    return UnderWay(work, flat, flat)


def reduce_by(reduce: Reduce, size: int, group: Group, flat: Tensor) -> ReductionUnderWay:
    """The user's reduction of a flat tensor to `size` elements: all, or this replica's part."""
    bucket = flat if size == flat.numel() else flat.view(group.size, size)
    return ReductionUnderWay(reduce, bucket, reduce(bucket, group.handle))
