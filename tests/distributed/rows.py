"""Rows of a mesh that share DTensors, one of which does something else than the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fpipe
from fpipe import schedules
from tests.distributed.crew import Outcome, attempt, mesh_of
from tests.distributed.traps import Trap


def stage(w: Any, x: Tensor) -> Tensor:
    """A matrix product whose weight may be divided, with collectives that then are needed."""
    if not isinstance(w, DTensor):
        return torch.tanh(x @ w)
    product: Any = torch.tanh(DTensor.from_local(x, w.device_mesh, [Replicate()]) @ w)
    whole: Tensor = product.full_tensor()
    return whole


class Row:
    """The pipeline of one of two rows of a mesh of four processes, and what it is called with.

    Attributes:
        mesh: of the four.
        place: which row this process is in.
        trap: its kernels.
        pipe: the pipeline.
        params: divided by columns.
        batch: the same on all processes.
    """

    def __init__(self, family: str = "one_f_one_b", remat: str = "none") -> None:
        self.mesh: DeviceMesh = mesh_of((2, 2), ("pp", "tp"))
        self.place = self.mesh.get_local_rank("tp")
        self.trap = Trap()
        schedule = schedules.get(family, ranks=2, microbatches=2)
        self.pipe = fpipe.pipeline(
            [stage] * 2,
            lambda y, _: y.square().mean(),
            schedule,
            mesh=self.mesh,
            compile=self.trap,
            remat=remat,
        )
        generator = torch.Generator().manual_seed(0)
        self.whole = [torch.randn(4, 4, generator=generator) for _ in range(2)]
        self.batch = torch.randn(4, 4, generator=generator)
        self.params = self.divided(Shard(1))

    def divided(self, placement: Any) -> Any:
        """Parameters that lie so over ``"tp"``."""
        mesh = self.mesh["tp"]
        parts = [distribute_tensor(w, mesh, [placement], src_data_rank=None) for w in self.whole]
        return self.pipe.local(parts)


def after_a_known_call(group: Any) -> list[Outcome]:
    """Both rows take a step; then one takes the known step and the other a new one."""
    row = Row()
    step, batch = row.pipe.step, row.batch
    other = torch.cat([batch, batch]) if row.place else batch
    turned = row.divided(Replicate() if row.place else Shard(1))
    return [
        attempt(step, row.params, batch),
        attempt(step, row.params, other),
        attempt(step, turned, batch),
        attempt(row.pipe.value if row.place else step, row.params, batch),
        attempt(step, row.params, batch),
    ]


def another_schedule(group: Any) -> Outcome:
    """One row has another schedule."""
    rank = dist.get_rank()
    row = Row("gpipe" if rank % 2 else "one_f_one_b")
    return attempt(row.pipe.step, row.params, row.batch)


def refused_by_one(group: Any, process: int) -> list[Outcome]:
    """A good call, one that one process refuses, and a good one again."""
    row = Row()
    guilty = dist.get_rank() == process
    batch: Any = [row.batch[0]] if guilty else row.batch
    return [
        attempt(row.pipe.step, row.params, row.batch),
        attempt(row.pipe.step, row.params, batch),
        attempt(row.pipe.step, row.params, row.batch),
    ]


def failing(
    group: Any, process: int, deed: str, at: int, family: str = "one_f_one_b", remat: str = "none"
) -> list[Outcome]:
    """A good step, one in which a kernel of a process does a deed, and what comes after."""
    row = Row(family, remat)
    good = attempt(row.pipe.step, row.params, row.batch)
    if dist.get_rank() == process:
        row.trap.arm(deed, at)
    bad = attempt(row.pipe.step, row.params, row.batch)
    return [good, bad, attempt(row.pipe.step, row.params, row.batch)]
