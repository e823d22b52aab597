"""All stages in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
from benchmarks.contest import Case, Outcome, Problem, check, fpipe_pipeline, torch_pipeline
from benchmarks.harness import Cell, interleave
from benchmarks.overhead.problem import REPEATS, make_problem

# The schedules that torch runs in one process, and how many stages they hold there.
SCHEDULES: Final = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 4,
    "LoopedBFS": 4,
    "InterleavedZeroBubble": 4,
    "ZBVZeroBubble": 2,
}

COLUMNS: Final = (
    "schedule",
    "actions",
    "fpipe, µs",
    "fpipe uncompiled, µs",
    "torch, µs",
    "autograd loop, µs",
    "torch / fpipe",
)


@contextmanager
def lone_process_group() -> Iterator[None]:
    """A group of this process alone: torch's schedules insist on one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def autograd_loop(problem: Problem, microbatches: int) -> Case:
    """No pipeline at all: each stage forward and backward by itself, through autograd."""
    weights = [weight.clone().requires_grad_() for weight in problem.params]
    inputs, targets = problem.inputs.chunk(microbatches), problem.targets.chunk(microbatches)

    def run() -> Tensor:
        total = torch.zeros(())
        for weight in weights:
            weight.grad = None
        for x, target in zip(inputs, targets, strict=True):
            passed: list[tuple[Tensor, Tensor]] = []
            for function, weight in zip(problem.functions, weights, strict=True):
                # Cut where a pipeline would send.
                x = x.detach().requires_grad_(bool(passed))
                y = function(weight, x)
                passed.append((x, y))
                x = y
            passed[-1] = (passed[-1][0], problem.loss(x, target) / microbatches)
            total += passed[-1][1].detach()
            cotangent = None
            for x, y in reversed(passed):
                torch.autograd.backward(y, cotangent)
                cotangent = x.grad
        return total

    def read(total: Tensor) -> Outcome:
        return Outcome(total, [weight.grad for weight in weights if weight.grad is not None])

    return Case(run, read)


def table(names: Sequence[str], microbatches: int, rounds: int) -> list[list[Cell]]:
    """The rows of the table."""
    with lone_process_group():
        return [_measure(name, microbatches, rounds) for name in names]


def _measure(name: str, microbatches: int, rounds: int) -> list[Cell]:
    stages = SCHEDULES[name]
    schedule = fpipe.schedules.get(name, ranks=1, microbatches=microbatches, stages_per_rank=stages)
    problem = make_problem(stages, microbatches)
    cases = {
        "fpipe": fpipe_pipeline(problem, schedule, compile=True, alone=True),
        "fpipe uncompiled": fpipe_pipeline(problem, schedule, compile=False, alone=True),
        "torch": torch_pipeline(problem, name, schedule, compile=False),
        "autograd": autograd_loop(problem, microbatches),
    }
    check(problem, range(stages), cases)
    timings = interleave({case: cases[case].run for case in cases}, rounds, repeats=REPEATS)
    actions = sum(map(len, schedule.actions))
    micros = [timings.median(case) / actions * 1e6 for case in cases]
    return [name, actions, *micros, timings.ratio("torch", "fpipe")]
