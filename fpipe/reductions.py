"""Reductions of gradients over replicas, for ``reduce=``: what DDP calls communication hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["bf16"]

# torch 2.13 has renamed it.
_scatter: Final[Callable[..., dist.Work]] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


class Widened:
    """A sum that is under way in a narrow dtype.

    Args:
        work: what adds up.
        result: what it fills.
        dtype: of the sum that is wanted.
    """

    def __init__(self, work: dist.Work, result: Tensor, dtype: torch.dtype) -> None:
        self._work = work
        self._result = result
        self._dtype = dtype

    def wait(self) -> Tensor:
        """The sum, when it is there."""
        self._work.wait()
        return self._result.to(self._dtype)


def bf16(bucket: Tensor, group: dist.ProcessGroup) -> Widened:
    """Add up gradients over replicas in bfloat16: half the bytes of float32 on the wire.

    As the hook ``bf16_compress_hook`` of torch's DDP does. Each addend is rounded to the 8 bits
    of a bfloat16, and so is each sum of two: a relative error of about 2 ** -9 of the addends, more
    over many replicas.

    Args:
        bucket: floating point. Its shape is [n], the sums of this replica; or
            [replicas, n], a row for each replica.
        group: the replicas.

    Returns:
        The sum over the group, of shape [n], in the dtype of `bucket`: of the bucket, or of the row
        of this replica. It is under way, ``wait()`` returns it.

    Example:
        >>> import fpipe
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> def make(stages, loss, schedule):
        ...     mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        ...     options = {"data": "dp", "reduce": fpipe.reductions.bf16}
        ...     return fpipe.pipeline(stages, loss, schedule, mesh=mesh, **options)
    """
    narrow = bucket.to(torch.bfloat16, copy=True)
    if bucket.dim() == 1:
        result = narrow
        work: Any = dist.all_reduce(narrow, group=group, async_op=True)
    else:
        result = narrow.new_empty(narrow.shape[-1])
        work = _scatter(result, narrow.view(-1), group=group, async_op=True)
    return Widened(work, result, bucket.dtype)
