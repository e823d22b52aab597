"""The walk of a step: which modules and functions one call enters, as a reader would follow it.

    python tests/walk.py

prints the figures of docs/architecture.md: for fpipe in one process, 1F1B with two stages and four
microbatches, and for torch.distributed.pipelining, rank 0 of two gloo processes and the same
schedule. With ``--list`` it also prints what a steady step of fpipe enters, in order.

A function is counted once, however often it is called, and a comprehension belongs to its function.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fpipe

ROWS, WIDTH, MICROBATCHES = 8, 4, 4


class Walk(NamedTuple):
    """What a call enters.

    Attributes:
        calls: how often each function is called, by module and name, in the order of first calls.
    """

    calls: Counter[tuple[str, str]]

    @property
    def modules(self) -> list[str]:
        """The modules, in the order in which they are first entered."""
        return list(dict.fromkeys(module for module, _ in self.calls))

    def __str__(self) -> str:
        calls = sum(self.calls.values())
        return f"{len(self.modules):>8}{len(self.calls):>11}{calls:>8}"


def walk(call: Callable[[], object], package: Path) -> Walk:
    """Make a call, and see what it enters of a package.

    Args:
        call: what is called.
        package: the folder of the package.
    """
    calls: Counter[tuple[str, str]] = Counter()
    prefix = f"{package}/"

    def enter(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        is_function = not code.co_name.startswith("<") or code.co_name == "<lambda>"
        if event == "call" and is_function and code.co_filename.startswith(prefix):
            calls[code.co_filename.removeprefix(prefix), code.co_qualname] += 1

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Walk(calls)


# ── fpipe ───────────────────────────────────────────────────────────────────────────────────────


def layer(weight: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ weight)


def square(y: Tensor, target: Any) -> Tensor:
    return y.square().mean()


def walks_of_step() -> tuple[Walk, Walk]:
    """What the first step of a pipeline enters, and what one enters when its plan is there."""
    schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=MICROBATCHES)
    pipe = fpipe.pipeline([layer, layer], square, schedule, compile=False)
    params, batch = [torch.eye(WIDTH)] * 2, torch.ones(ROWS, WIDTH)
    package = Path(fpipe.__file__).parent
    first, _, steady = (walk(lambda: pipe.step(params, batch), package) for _ in range(3))
    return first, steady


# ── torch.distributed.pipelining ────────────────────────────────────────────────────────────────


def walk_beside(rank: int, rendezvous: str) -> None:
    """Run one rank of torch's pipeline, and print what its steps enter on rank 0."""
    from torch.distributed import pipelining

    options: dict[str, Any] = {"init_method": f"file://{rendezvous}", "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", **options)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, MICROBATCHES, loss_fn=square)
    batch = torch.ones(ROWS, WIDTH)

    def step() -> None:
        schedule.step(batch) if rank == 0 else schedule.step(target=batch)

    package = Path(pipelining.__file__).parent
    first, _, steady = (walk(step, package) for _ in range(3))
    if rank == 0:
        print(f"{'torch, first step':<20}{first}\n{'torch, steady step':<20}{steady}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print all figures."""
    first, steady = walks_of_step()
    if "--list" in sys.argv:
        for (module, name), calls in steady.calls.items():
            print(f"{calls:>4}  {module:<32}{name}")
    print(f"{'':<20} modules  functions   calls")
    print(f"{'fpipe, first step':<20}{first}\n{'fpipe, steady step':<20}{steady}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(walk_beside, (f"{folder}/rendezvous",), nprocs=2)


if __name__ == "__main__":
    main()
