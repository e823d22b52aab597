"""Which dimensions of a mesh hold replicas: the rows of a batch are divided over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fpipe.errors import StageError, check_choice
from fpipe.schedule.arguments import plain_count
from fpipe.spec.policies import Precision

STATES = ("mean", "first")
"""How replicas agree on a state: the mean of theirs, or that of the first replica."""


Reduce = Callable[[Tensor, dist.ProcessGroup], Any]
"""A user's reduction: from a flat tensor and the group to the sum, or what waits for it."""


class Group(NamedTuple):
    """The processes along one dimension of a mesh.

    Attributes:
        handle: of torch.
        size: the number of processes.
        rank: of this process among them.
    """

    handle: dist.ProcessGroup
    size: int
    rank: int


@dataclass(frozen=True)
class Data:
    """Data parallelism beside a pipeline.

    Attributes:
        mesh: of all dimensions.
        dims: those that hold replicas. Parameters are divided over the last one; with two of them
            (hybrid sharding), each index of the first has all parameters.
        state: how replicas agree on a state, one of `STATES`.
        bucket_bytes: the most bytes that one collective moves, unless one leaf has more; None for
            one collective per stage and dtype.
        dtype: in which floating-point parameters are gathered; None for their own.
        reduce: adds up a flat tensor over a group in place of torch; None for torch.
    """

    mesh: DeviceMesh = field(repr=False, compare=False)
    dims: tuple[str, ...]
    state: str = "mean"
    bucket_bytes: int | None = None
    dtype: torch.dtype | None = None
    reduce: Reduce | None = field(default=None, repr=False)

    def gathered_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter is gathered."""
        return stored if self.dtype is None or not stored.is_floating_point else self.dtype

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups over which gradients are added up, one a dimension."""
        return tuple(
            Group(self.mesh.get_group(dim), self.mesh[dim].size(), rank)
            for dim, rank in zip(self.dims, self._coordinates(), strict=True)
        )

    @property
    def sharding(self) -> str:
        """The dimension over which parameters are divided."""
        return self.dims[-1]

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return prod(self.mesh[dim].size() for dim in self.dims)

    @property
    def replica(self) -> int:
        """The number of this process's replica."""
        number = 0
        for dim, rank in zip(self.dims, self._coordinates(), strict=True):
            number = number * self.mesh[dim].size() + rank
        return number

    def _coordinates(self) -> list[int]:
        return [self.mesh.get_local_rank(dim) for dim in self.dims]


def read_data(
    data: str | Sequence[str] | None,
    mesh: DeviceMesh | None,
    *,
    state: str = "mean",
    bucket_bytes: int | None = None,
    precision: Precision | None = None,
    reduce: Reduce | None = None,
) -> Data | None:
    """The dimensions that a user names.

    Args:
        data: a dimension of the mesh, or two for hybrid sharding; None for no data parallelism.
        mesh: as `fpipe.pipeline` takes it.
        state: as for `Data`.
        bucket_bytes: as for `Data`.
        precision: the dtypes of the pipeline.
        reduce: as for `Data`.

    Raises:
        StageError: there is no such dimension, or an option is wrong.
    """
    check_choice("replica_state", state, STATES)
    if bucket_bytes is not None and plain_count(bucket_bytes) is None:
        raise StageError(
            f"bucket_bytes={bucket_bytes!r:.60} must be a number of bytes, 1 or more, or None for "
            "one collective per stage and dtype"
        )
    if reduce is not None and (data is None or not callable(reduce)):
        raise StageError(
            f"reduce={reduce!r:.60} must be a function (bucket, group) -> bucket beside data=, "
            "which names the dimension of the mesh that holds replicas"
        )
    if data is None:
        return None
    dims = (data,) if isinstance(data, str) else tuple(data) if isinstance(data, Sequence) else ()
    names = () if mesh is None else mesh.mesh_dim_names or ()
    others = [name for name in names if name != "pp"]
    if mesh is None:
        raise StageError(
            f"data={data!r:.60} names a dimension of a mesh, and mesh is not given: pass "
            'mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))'
        )
    if not 1 <= len(dims) <= 2 or len(set(dims)) < len(dims) or not set(dims) <= set(others):
        raise StageError(
            f"data={data!r:.60} must be one of the mesh's dimensions {tuple(others)}, or two of "
            'them, (replicate, shard); "pp" is the pipeline'
        )
    dtype = None if precision is None else precision.param_dtype
    return Data(mesh, dims, state, bucket_bytes, dtype, reduce)
