"""How long does one compute action take when there is next to nothing to compute?

    python -m benchmarks.overhead.run
    python -m benchmarks.overhead.run --ranks 2

See the README beside this file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

import fpipe
from benchmarks.contest import SHARED
from benchmarks.harness import Cell, Report, add_arguments, command, interleave, machine, publish
from benchmarks.overhead import across

WIDTH: Final = 8
ROWS: Final = 8  # in a microbatch
REPEATS: Final = 10  # steps in a row, for a step takes a millisecond
CPU: Final = torch.device("cpu")

# The schedules that torch runs in one process, and how many stages they hold there.
SCHEDULES: Final = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 4,
    "LoopedBFS": 4,
    "InterleavedZeroBubble": 4,
    "ZBVZeroBubble": 2,
}

Step = Callable[[], object]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """Stages of one small matmul each, the same for everyone."""

    schedule: fpipe.Schedule
    weights: list[Tensor]
    batch: Batch

    @property
    def actions(self) -> int:
        """How many compute actions a step has."""
        return sum(len(row) for row in self.schedule.actions)


def make_problem(name: str, microbatches: int) -> Problem:
    generator = torch.Generator().manual_seed(0)
    stages, rows = SCHEDULES[name], microbatches * ROWS
    # A V has two stages on each rank and no choice; one-stage families have no such argument.
    extra = {"stages_per_rank": stages} if stages == 4 else {}
    return Problem(
        fpipe.schedules.get(name, ranks=1, microbatches=microbatches, **extra),
        [torch.randn(WIDTH, WIDTH, generator=generator) / 3 for _ in range(stages)],
        (
            torch.randn(rows, WIDTH, generator=generator),
            torch.randn(rows, WIDTH, generator=generator),
        ),
    )


# ── fpipe ───────────────────────────────────────────────────────────────────────────────────────


def first(weight: Tensor, batch: Batch) -> Tensor:
    return batch[0] @ weight


def later(weight: Tensor, x: Tensor) -> Tensor:
    return x @ weight


def loss(y: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(y, batch[1])


def fpipe_step(problem: Problem, compile: bool) -> Step:
    stages: list[Callable[[Tensor, Any], Tensor]] = [first, *[later] * (len(problem.weights) - 1)]
    pipe = fpipe.pipeline(stages, loss, problem.schedule, compile=compile)
    return lambda: pipe.step(problem.weights, problem.batch)


# ── torch.distributed.pipelining ────────────────────────────────────────────────────────────────


class Matmul(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def torch_step(name: str, problem: Problem) -> Step:
    modules = nn.ModuleList(Matmul(weight) for weight in problem.weights)
    stages = [PipelineStage(module, i, len(modules), CPU) for i, module in enumerate(modules)]
    microbatches = problem.schedule.num_microbatches
    make: Any = get_schedule_class(name)
    schedule = make(stages if len(stages) > 1 else stages[0], microbatches, loss_fn=F.mse_loss)
    x, target = problem.batch

    def step() -> list[Tensor | None]:
        modules.zero_grad(set_to_none=True)
        schedule.step(x, target=target)
        return [parameter.grad for parameter in modules.parameters()]

    return step


@contextmanager
def lone_process_group() -> Iterator[None]:
    """A group of this process alone: torch's schedules insist on one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ── the floor ───────────────────────────────────────────────────────────────────────────────────


def autograd_step(problem: Problem) -> Step:
    """A loop without any pipeline: each stage forward and backward by itself, through autograd."""
    weights = [weight.clone().requires_grad_() for weight in problem.weights]
    microbatches = problem.schedule.num_microbatches
    inputs, targets = (leaf.chunk(microbatches) for leaf in problem.batch)

    def step() -> list[Tensor | None]:
        for weight in weights:
            weight.grad = None
        for x, target in zip(inputs, targets, strict=True):
            passed: list[tuple[Tensor, Tensor]] = []
            for weight in weights:
                # Cut where a pipeline would send.
                x = x.detach().requires_grad_(bool(passed))
                y = x @ weight
                passed.append((x, y))
                x = y
            passed[-1] = (passed[-1][0], F.mse_loss(x, target) / microbatches)
            cotangent = None
            for x, y in reversed(passed):
                torch.autograd.backward(y, cotangent)
                cotangent = x.grad
        return [weight.grad for weight in weights]

    return step


def check(cases: dict[str, Step], problem: Problem) -> None:
    """All compute the same gradients, or the comparison means nothing."""
    expected: Any = cases["autograd"]()
    for name, run in cases.items():
        outcome: Any = run()
        grads = outcome.grads if name.startswith("fpipe") else outcome
        for grad, reference in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, reference, rtol=1e-4, atol=1e-6)


def measure(name: str, microbatches: int, rounds: int) -> list[Cell]:
    """One row of the table: microseconds per compute action."""
    problem = make_problem(name, microbatches)
    cases = {
        "fpipe": fpipe_step(problem, compile=True),
        "fpipe uncompiled": fpipe_step(problem, compile=False),
        "torch": torch_step(name, problem),
        "autograd": autograd_step(problem),
    }
    check(cases, problem)
    timings = interleave(cases, rounds, repeats=REPEATS)
    micros = {case: timings.median(case) / problem.actions * 1e6 for case in cases}
    return [name, problem.actions, *micros.values(), timings.ratio("torch", "fpipe")]


COLUMNS: Final = (
    "schedule",
    "actions",
    "fpipe, µs",
    "fpipe uncompiled, µs",
    "torch, µs",
    "autograd loop, µs",
    "torch / fpipe",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1, help="processes; 1 uses none but this")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument(
        "--schedule", choices={**SCHEDULES, **SHARED}, action="append", help="only this one"
    )
    add_arguments(parser, rounds=50)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    microbatches, rounds = arguments.microbatches, arguments.rounds
    if arguments.ranks == 1:
        with lone_process_group():
            names = arguments.schedule or SCHEDULES
            rows = [measure(name, microbatches, rounds) for name in names]
    else:
        names = list(arguments.schedule or SHARED)
        rows = across.table(arguments.ranks, names, microbatches, ROWS, WIDTH, rounds)
    report = Report(
        title="Microseconds per compute action",
        command=command("benchmarks.overhead.run"),
        machine=machine(CPU),
        settings={"ranks": arguments.ranks, "microbatches": microbatches, "rounds": rounds},
        columns=COLUMNS if arguments.ranks == 1 else across.COLUMNS,
        rows=rows,
    )
    publish(report, arguments)


if __name__ == "__main__":
    main()
