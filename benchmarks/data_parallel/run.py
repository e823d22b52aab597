"""What does a step of a GPT on two replicas of two ranks cost, beside FSDP2 and DDP of torch?

    python -m benchmarks.data_parallel.run

See the README beside this file.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.profiler import ProfilerActivity, profile

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
    Stage,
    batch_loss,
    compare_gradients,
    make_batch,
    make_stages,
    stage_function,
    surprise,
)

NAMES: Final = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
USUAL: Final = NAMES[:2]
POLICIES: Final[dict[str, tuple[Any, Any]]] = {
    "fpipe, gather step, reduce step": ("step", "step"),
    "fpipe, gather step, reduce 2": ("step", 2),
    "fpipe, gather 1, reduce 2": (1, 2),
}
MEBI: Final = 2**20
COLLECTIVES: Final = frozenset({"gloo:all_gather", "gloo:all_reduce", "gloo:reduce_scatter"})
COLUMNS: Final = (
    "schedule",
    "who",
    "ms",
    "/ fpipe, gather step, reduce step",
    "peak MiB",
    "planned MiB",
    "collectives",
    "MiB given to them",
)

Case = tuple[Callable[[], Any], Callable[[], list[Tensor]], Callable[[], Any], float | None]
"""A step, the gradients of the last one on this rank, what lets go of them, and a planned peak."""


def ours(
    stages: list[Stage],
    schedule: fpipe.Schedule,
    mesh: Any,
    data: Any,
    divided: bool,
    compile: bool,
) -> Case:
    """A step of fpipe, on divided parameters or on whole ones."""
    functions = [stage_function(stage) for stage in stages]
    pipe = fpipe.pipeline(functions, batch_loss, schedule, mesh=mesh, data="dp", compile=compile)
    held = pipe.local([dict(stage.named_parameters()) for stage in stages])
    params = pipe.shard(held) if divided else pipe.replicate(held)
    planned = pipe.programs(params, data)[pipe.rank or 0].peak_bytes / MEBI
    kept: list[Any] = []

    def run() -> Any:
        kept[:] = [pipe.step(params, data).grads]

    def grads() -> list[Tensor]:
        return [g[name] for g in kept[0] if g is not None for name in g]

    return run, grads, kept.clear, planned


def theirs(
    name: str, stages: list[Stage], schedule: fpipe.Schedule, mesh: Any, data: Any, shards: bool
) -> Case:
    """A step of torch.distributed.pipelining, over FSDP2 or with an all-reduce after it, as DDP."""
    group = mesh.get_group("pp")
    own = schedule.stages_of(group.rank())
    modules = nn.ModuleList(stages[stage] for stage in own)
    if shards:
        for module in modules:
            fully_shard(module, mesh=mesh["dp"])  # all of a stage at once, as fpipe gathers it
    made = [
        PipelineStage(module, stage, schedule.num_stages, CPU, group=group)
        for stage, module in zip(own, modules, strict=True)
    ]
    kind: Any = get_schedule_class(name)
    single = issubclass(kind, PipelineScheduleSingle)
    runner = kind(made[0] if single else made, schedule.num_microbatches, loss_fn=surprise)
    inputs = (data["inputs"],) if 0 in own else ()
    targets = data["targets"] if schedule.num_stages - 1 in own else None
    parameters = list(modules.parameters())

    def run() -> Any:
        modules.zero_grad(set_to_none=True)
        runner.step(*inputs, target=targets, losses=[], return_outputs=False)
        if not shards:  # DDP's own hooks would reduce in every microbatch
            gradients = [parameter.grad for parameter in parameters]
            flat = torch.cat([grad.flatten() for grad in gradients if grad is not None])
            dist.all_reduce(flat, group=mesh.get_group("dp"))
            flat /= mesh["dp"].size()
            parts = flat.split([parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter)

    def grads() -> list[Tensor]:
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    return run, grads, lambda: modules.zero_grad(set_to_none=True), None


def collectives(run: Callable[[], Any]) -> tuple[int, float]:
    """How many collectives a step runs among replicas on this process, and the MiB given to them.

    Small ones, with which ranks agree, do not count.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    sizes = [
        sum(math.prod(shape) for shape in event.input_shapes if shape)
        for event in profiler.events()
        if event.name in COLLECTIVES
    ]
    large = [size for size in sizes if size > 1000]
    return len(large), sum(large) * torch.float32.itemsize / MEBI


def measure(
    rank: int,
    names: Sequence[str],
    width: int,
    blocks: int,
    length: int,
    rows: int,
    rounds: int,
    compile: bool,
) -> list[list[Cell]]:
    """Rows of the table."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    data = make_batch(rows, length, mesh.get_local_rank("dp"), 2)
    table: list[list[Cell]] = []
    for name in names:
        schedule = schedule_of(name, 2, 8)
        stages = make_stages(schedule.num_stages, width, 8, blocks)
        cases: dict[str, Case] = {
            label: ours(copy.deepcopy(stages), schedule.sharded(*policy), mesh, data, True, compile)
            for label, policy in POLICIES.items()
        }
        cases["fpipe, replicated"] = ours(
            copy.deepcopy(stages), schedule, mesh, data, False, compile
        )
        cases["torch, FSDP2"] = theirs(name, copy.deepcopy(stages), schedule, mesh, data, True)
        cases["torch, replicated"] = theirs(name, stages, schedule, mesh, data, False)
        compare_gradients({label: case[:3] for label, case in cases.items()})
        times = interleave_ranks({label: case[0] for label, case in cases.items()}, rounds)
        for label, (run, _, clear, planned) in cases.items():
            clear()
            dist.barrier()
            [peak] = greatest([memory.peak(run) / MEBI])
            clear()
            [plan] = greatest([planned or 0.0])
            table.append(
                [
                    name,
                    label,
                    1e3 * times.median(label),
                    times.ratio(label, next(iter(cases))),
                    peak,
                    plan or None,
                    *collectives(run),
                ]
            )
            clear()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", choices=NAMES, action="append", help="only this one")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16)
    add_uncompiled(parser)
    add_arguments(parser, rounds=15)
    arguments = parser.parse_args()
    sizes = (arguments.width, arguments.blocks, arguments.length, arguments.rows)
    names = arguments.schedule or USUAL
    rows = on_ranks(4, measure, names, *sizes, arguments.rounds, not arguments.uncompiled)
    report = Report(
        title="A GPT on two replicas of two ranks",
        command=command("benchmarks.data_parallel.run"),
        machine=machine(CPU),
        settings={
            "width, blocks, length, rows of a replica": ", ".join(map(str, sizes)),
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
