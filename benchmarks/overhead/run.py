"""How long does one compute action take when there is next to nothing to compute?

    python -m benchmarks.overhead.run
    python -m benchmarks.overhead.run --ranks 2

See the README beside this file.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.contest import CPU, SHARED
from benchmarks.harness import Report, add_arguments, command, machine, publish
from benchmarks.overhead import across, alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1, help="processes; 1 uses none but this")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument(
        "--schedule", choices={**alone.SCHEDULES, **SHARED}, action="append", help="only this one"
    )
    add_arguments(parser, rounds=50)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ranks, microbatches, rounds = arguments.ranks, arguments.microbatches, arguments.rounds
    if ranks == 1:
        rows = alone.table(arguments.schedule or list(alone.SCHEDULES), microbatches, rounds)
    else:
        rows = across.table(ranks, arguments.schedule or list(SHARED), microbatches, rounds)
    report = Report(
        title="Microseconds per compute action",
        command=command("benchmarks.overhead.run"),
        machine=machine(CPU),
        settings={"ranks": ranks, "microbatches": microbatches, "rounds": rounds},
        columns=alone.COLUMNS if ranks == 1 else across.COLUMNS,
        rows=rows,
    )
    publish(report, arguments)


if __name__ == "__main__":
    main()
