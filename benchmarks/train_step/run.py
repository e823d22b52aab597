"""What do clipping and the optimizer add to a step?

    python -m benchmarks.train_step.run

See the README beside this file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import fpipe
from benchmarks import memory
from benchmarks.contest import CPU, Problem, schedule_of, stages_and_loss, torch_pipeline
from benchmarks.efficiency.run import make_problem as make_naps
from benchmarks.harness import (
    Cell,
    Report,
    add_arguments,
    add_uncompiled,
    command,
    machine,
    publish,
)
from benchmarks.ranks import greatest, interleave_ranks, on_ranks
from benchmarks.versus_torch.model import Size
from benchmarks.versus_torch.model import make_problem as make_gpt
from fpipe import pytree

LEAVES: Final = 3  # of a sleeping stage
SLEEPING: Final = ("1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
MEBI: Final = 2**20
NORM: Final = 1e9  # of which no gradient is longer: a step that is clipped is updated twice
COLUMNS: Final = ("stages", "schedule", "who", "ms", "beyond the step alone, ms", "peak MiB")


def napping(seconds: float) -> type[torch.optim.Optimizer]:
    """SGD whose step of each parameter sleeps."""

    class Nap(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 1e-3) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        grad = torch.ops.fpipe_naps.nap(param.grad, seconds)
                        param.add_(grad, alpha=-group["lr"])

    return Nap


def ours(
    problem: Problem, schedule: fpipe.Schedule, optimizer: Any, compile: bool, **options: Any
) -> Callable[[], Any]:
    """A training step of fpipe; it goes on from the parameters of the last one."""
    stages, loss = stages_and_loss(problem)
    pipe = fpipe.pipeline(stages, loss, schedule, compile=compile, group=dist.group.WORLD)
    trainer = fpipe.train(pipe, optimizer, lr=1e-3, **options)
    batch = (problem.inputs, problem.targets)
    held = [pytree.tree_map(torch.clone, pipe.local(problem.params))]  # a step may write into them
    held.append(trainer.init(held[0]))

    def run() -> None:
        held[:] = trainer.step(held[0], held[1], batch)[1:3]

    return run


def theirs(
    problem: Problem, name: str, schedule: fpipe.Schedule, make: Callable[..., Any], compile: bool
) -> Callable[[], Any]:
    """A training step of torch: its schedule, `clip_grad_norm_` over ranks, and its optimizer."""
    case = torch_pipeline(problem, name, schedule, compile=compile)
    modules: Any = case.clear.__self__  # type: ignore[attr-defined]
    parameters: list[nn.Parameter] = list(modules.parameters())
    optimizer = make(parameters)

    def run() -> None:
        case.run()
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        square = norm.double().square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(parameters, NORM, square.sqrt().float())
        optimizer.step()

    return run


def measure_naps(
    rank: int, world: int, names: Sequence[str], seconds: float, rounds: int
) -> list[list[Cell]]:
    """Sleeping stages: how long the step of the optimizer is, and the barrier before it."""
    table: list[list[Cell]] = []
    nap, none = napping(seconds / LEAVES), napping(0.0)
    for name in names:
        schedule = schedule_of(name, world, 8)
        problem = make_naps(schedule, seconds)
        steps = {
            "fpipe, no optimizer": ours(problem, schedule, none, False),
            "fpipe, no clipping": ours(problem, schedule, nap, False),
            "fpipe, validated": ours(problem, schedule, nap, False, max_norm=NORM),
            "fpipe, barrier": ours(problem, schedule, nap, False, max_norm=NORM, clip="wait"),
            "torch": theirs(problem, name, schedule, nap, False),
        }
        times = interleave_ranks(steps, rounds)
        base = times.median("fpipe, no optimizer")
        for label in steps:
            taken = times.median(label)
            table.append(["sleeping", name, label, 1e3 * taken, 1e3 * (taken - base), None])
    return table


def measure_gpt(rank: int, names: Sequence[str], rounds: int, compile: bool) -> list[list[Cell]]:
    """The GPT of `versus_torch` on two ranks, with AdamW."""
    table: list[list[Cell]] = []
    for name in names:
        schedule = schedule_of(name, 2, Size().microbatches)
        problem = make_gpt(Size(), schedule.num_stages)
        adamw: Any = torch.optim.AdamW
        steps = {
            "fpipe, no clipping": ours(problem, schedule, adamw, compile),
            "fpipe, validated": ours(problem, schedule, adamw, compile, max_norm=NORM),
            "fpipe, barrier": ours(problem, schedule, adamw, compile, max_norm=NORM, clip="wait"),
            "fpipe, donated": ours(problem, schedule, adamw, compile, max_norm=NORM, donate=True),
            "torch, fused": theirs(
                problem, name, schedule, partial(adamw, lr=1e-3, fused=True), compile
            ),
            "torch, foreach": theirs(
                problem, name, schedule, partial(adamw, lr=1e-3, foreach=True), compile
            ),
        }
        times = interleave_ranks(steps, rounds)
        for label, run in steps.items():
            dist.barrier()
            [peak] = greatest([memory.peak(run) / MEBI])
            table.append(["gpt", name, label, 1e3 * times.median(label), None, peak])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=("sleeping", "gpt"), action="append", help="only this")
    parser.add_argument("--milliseconds", type=float, default=10.0, help="of F, I, W and UPDATE")
    add_uncompiled(parser)
    add_arguments(parser, rounds=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kinds, rounds = arguments.kind or ("sleeping", "gpt"), arguments.rounds
    rows: list[list[Cell]] = []
    if "sleeping" in kinds:
        seconds = arguments.milliseconds / 1e3
        rows += on_ranks(4, measure_naps, 4, SLEEPING, seconds, rounds)
    if "gpt" in kinds:
        rows += on_ranks(2, measure_gpt, ("1F1B",), rounds, not arguments.uncompiled)
    report = Report(
        title="Whole training steps: clipping and the optimizer",
        command=command("benchmarks.train_step.run"),
        machine=machine(CPU),
        settings={"microbatches": 8, "rounds": rounds, "nap, ms": arguments.milliseconds},
        columns=COLUMNS,
        rows=rows,
    )
    publish(report, arguments)


if __name__ == "__main__":
    main()
