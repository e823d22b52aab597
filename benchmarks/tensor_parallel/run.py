"""How long does a step of a GPT take that is divided by 2 and pipelined by 2, beside torch's own?

    python -m benchmarks.tensor_parallel.run

See the README beside this file.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

import fpipe
from benchmarks import memory
from benchmarks.contest import CPU, schedule_of
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
from benchmarks.tensor_parallel.model import (
    Case,
    Stage,
    batch_loss,
    compare_gradients,
    divide,
    make_batch,
    make_stages,
    stage_function,
    surprise,
)

REFUSED: Final = "refused"
NAMES: Final = ("GPipe", "1F1B", "Interleaved1F1B")
MEBI: Final = 2**20
COLUMNS: Final = (
    "schedule",
    "fpipe, ms",
    "torch eager, ms",
    "torch compiled, ms",
    "fpipe / best torch",
    "peak MiB: fpipe",
    "torch eager",
    "torch compiled",
)


def ours(
    stages: list[Stage], schedule: fpipe.Schedule, mesh: Any, data: Any, compile: bool
) -> Case:
    """A step of fpipe."""
    functions = [stage_function(stage) for stage in stages]
    pipe = fpipe.pipeline(functions, batch_loss, schedule, mesh=mesh, compile=compile)
    params = pipe.local([dict(stage.named_parameters()) for stage in stages])
    kept: list[Any] = []

    def run() -> Any:
        kept[:] = [pipe.step(params, data).grads]

    def grads() -> list[Tensor]:
        return [g[name] for g in kept[0] if g is not None for name in g]

    return run, grads, kept.clear


def theirs(
    name: str, stages: list[Stage], schedule: fpipe.Schedule, mesh: Any, data: Any, compile: bool
) -> Case:
    """A step of torch.distributed.pipelining over the same modules."""
    group = mesh.get_group("pp")
    own = schedule.stages_of(group.rank())
    modules = nn.ModuleList(stages[stage] for stage in own)
    wrapped: list[Any] = [torch.compile(module) if compile else module for module in modules]
    made = [
        PipelineStage(module, stage, schedule.num_stages, CPU, group=group)
        for stage, module in zip(own, wrapped, strict=True)
    ]
    kind: Any = get_schedule_class(name)
    single = issubclass(kind, PipelineScheduleSingle)
    runner = kind(made[0] if single else made, schedule.num_microbatches, loss_fn=surprise)
    inputs = (data["inputs"],) if 0 in own else ()
    targets = data["targets"] if schedule.num_stages - 1 in own else None

    def run() -> Any:
        modules.zero_grad(set_to_none=True)
        runner.step(*inputs, target=targets, losses=[], return_outputs=False)

    def grads() -> list[Tensor]:
        return [p.grad for module in modules for p in module.parameters() if p.grad is not None]

    return run, grads, lambda: modules.zero_grad(set_to_none=True)


def compiles(stage: Stage, width: int, data: Any) -> bool:
    """Whether `torch.compile` takes a stage on all processes; alone it leaves nobody waiting."""
    inputs = data["inputs"][:4]
    example = inputs if stage.embed is not None else torch.randn(*inputs.shape, width)
    try:
        torch.compile(copy.deepcopy(stage))(example).sum().backward()
        failed = 0.0
    except Exception as error:
        print(f"torch.compile refuses a stage: {type(error).__name__}", flush=True)
        failed = 1.0
    return not greatest([failed])[0]


def measure(
    rank: int, width: int, blocks: int, length: int, rows: int, rounds: int, compile: bool
) -> list[list[Cell]]:
    """Rows of the table."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    data = make_batch(rows, length)
    table: list[list[Cell]] = []
    for name in NAMES:
        schedule = schedule_of(name, 2, 8)
        stages = make_stages(schedule.num_stages, width, 8, blocks)
        for stage in stages:
            divide(stage, mesh["tp"])
        cases: dict[str, Case] = {
            "fpipe": ours(copy.deepcopy(stages), schedule, mesh, data, compile),
            "torch eager": theirs(name, copy.deepcopy(stages), schedule, mesh, data, False),
        }
        own = schedule.stages_of(mesh.get_local_rank("pp"))
        if compile and compiles(stages[own[0]], width, data):
            cases["torch compiled"] = theirs(name, stages, schedule, mesh, data, True)
        compare_gradients(cases)
        times = interleave_ranks({label: case[0] for label, case in cases.items()}, rounds)
        peaks: dict[str, float] = {}
        for label, (run, _, clear) in cases.items():
            clear()
            dist.barrier()
            [peaks[label]] = greatest([memory.peak(run) / MEBI])
            clear()
        best = min((label for label in cases if label != "fpipe"), key=times.median)
        labels = ("fpipe", "torch eager", "torch compiled")
        milliseconds = [1e3 * times.median(n) if n in cases else None for n in labels]
        table.append(
            [
                name,
                *(REFUSED if compile and value is None else value for value in milliseconds),
                times.ratio("fpipe", best),
                *(peaks.get(label) for label in labels),
            ]
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rows", type=int, default=32)
    add_uncompiled(parser)
    add_arguments(parser, rounds=15)
    arguments = parser.parse_args()
    sizes = (arguments.width, arguments.blocks, arguments.length, arguments.rows)
    rows = on_ranks(4, measure, *sizes, arguments.rounds, not arguments.uncompiled)
    report = Report(
        title="A GPT divided by 2 and pipelined by 2",
        command=command("benchmarks.tensor_parallel.run"),
        machine=machine(CPU),
        settings={
            "width, blocks, length, rows": ", ".join(map(str, sizes)),
            "processes": "4, on as many cores as above",
            "microbatches": 8,
            "rounds": arguments.rounds,
        },
        columns=COLUMNS,
        rows=rows,
    )
    publish(report, arguments)


if __name__ == "__main__":
    main()
