"""How many bytes does a step hold for each parameter, under each policy?

    python -m benchmarks.data_parallel.bytes

See the README beside this file.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fpipe
from benchmarks import memory
from benchmarks.contest import CPU
from benchmarks.harness import Cell, Report, add_arguments, command, machine, publish
from benchmarks.ranks import greatest, on_ranks

STAGES: Final = 4
POLICIES: Final[tuple[tuple[Any, Any], ...]] = (
    ("step", "step"),
    ("step", 2),
    (2, "step"),
    (1, "step"),
    (1, 2),
    (1, 1),
)
COLUMNS: Final = (
    "replicas",
    "parameters",
    "gather, reduce",
    "held",
    "planned beside",
    "measured beside",
    "measured / planned",
)


def layer(weight: Tensor, x: Tensor) -> Tensor:
    """One product; its activations are small beside its weight."""
    return torch.tanh(x @ weight)


def measure(rank: int, replicas: int, width: int) -> list[list[Cell]]:
    """Rows of the table: bytes for each of all parameters."""
    mesh = init_device_mesh("cpu", (replicas, 1), mesh_dim_names=("dp", "pp"))
    plain = fpipe.schedules.looped_bfs(ranks=1, microbatches=4, stages_per_rank=STAGES)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(width, width, generator=generator) for _ in range(STAGES)]
    batch = torch.randn(4, width, generator=generator)
    count = STAGES * width * width
    table: list[list[Cell]] = []
    for divided in (True, False):
        for gather, reduce in POLICIES if divided else POLICIES[:1]:
            pipe = fpipe.pipeline(
                [layer] * STAGES,
                lambda y, _: y.square().mean(),
                plain.sharded(gather, reduce),
                mesh=mesh,
                data="dp",
                compile=False,
            )
            given = pipe.local(weights)
            params = pipe.shard(given) if divided else pipe.replicate(given)
            pipe.step(params, batch)
            planned = pipe.programs(params, batch)[0].peak_bytes
            [peak] = greatest([float(memory.peak(lambda: pipe.step(params, batch)))])  # noqa: B023
            table.append(
                [
                    str(replicas),
                    "divided" if divided else "replicated",
                    f"{gather}, {reduce}",
                    4 / replicas if divided else 4.0,
                    planned / count,
                    peak / count,
                    peak / planned,
                ]
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    add_arguments(parser, rounds=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for d in (2, 4) for row in on_ranks(d, measure, d, arguments.width)]
    report = Report(
        title="Bytes of a step for each parameter, in float32",
        command=command("benchmarks.data_parallel.bytes"),
        machine=machine(CPU),
        settings={"stages of the rank": STAGES, "width": arguments.width, "microbatches": 4},
        columns=COLUMNS,
        rows=rows,
    )
    publish(report, arguments)


if __name__ == "__main__":
    main()
