"""How much of the time of collectives is not hidden behind the kernels of a step?

    python -m benchmarks.data_parallel.exposed

See the README beside this file.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fpipe
from benchmarks.contest import CPU
from benchmarks.efficiency.run import make_problem
from benchmarks.harness import Cell, Report, add_arguments, command, machine, publish
from benchmarks.ranks import interleave_ranks, on_ranks
from fpipe.program import async_collectives

RANKS: Final = 2
POLICIES: Final[tuple[tuple[Any, Any], ...]] = (("step", "step"), (2, "step"), ("step", 4))
COLUMNS: Final = (
    "stages of a rank",
    "gather, reduce",
    "step without delays, ms",
    "delays of a rank, ms",
    "exposed, ms",
    "exposed as simulated, ms",
    "measured / simulated",
    "exposed / delays",
)


class Delayed(async_collectives.UnderWay):
    """A collective that takes `seconds` longer, behind the one before it.

    Nothing waits where it begins, only where its result is waited for.
    """

    seconds = 0.0
    end = 0.0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        Delayed.end = max(Delayed.end, time.perf_counter()) + Delayed.seconds
        self._end = Delayed.end

    def wait(self) -> Tensor:
        time.sleep(max(0.0, self._end - time.perf_counter()))
        return super().wait()


def simulated(schedule: fpipe.Schedule, nap: float, delay: float) -> float:
    """Seconds of a step whose F, I and W take `nap` each, and its collectives `delay`."""
    each = [nap] * schedule.num_stages
    wait = [delay] * schedule.num_stages
    cost = fpipe.Cost(f=each, i=each, w=each, unshard=wait, reduce_grad=wait, collective_lane=True)
    return fpipe.simulate(schedule, cost).makespan


def measure(rank: int, stages: list[int], nap: float, delay: float, rounds: int) -> list[Any]:
    """Rows of the table."""
    mesh = init_device_mesh("cpu", (2, RANKS), mesh_dim_names=("dp", "pp"))
    async_collectives.UnderWay = Delayed  # type: ignore[misc, assignment]
    table: list[list[Cell]] = []
    for count in stages:
        for gather, reduce in POLICIES:
            plain = fpipe.schedules.interleaved_1f1b(
                ranks=RANKS, microbatches=8, stages_per_rank=count
            )
            schedule = plain.sharded(gather, reduce)
            problem = make_problem(schedule, nap)
            first, *others = problem.functions

            def begin(params: Any, batch: Any, first: Any = first) -> Any:
                return first(params, batch[0])

            pipe = fpipe.pipeline(
                [begin, *others],
                lambda y, batch: problem.loss(y, batch[1]),  # noqa: B023 - used in this round
                schedule,
                mesh=mesh,
                data="dp",
                compile=False,
            )
            params = pipe.shard(pipe.local(problem.params))
            batch = (problem.inputs, problem.targets)

            def step(seconds: float, pipe: Any, params: Any, batch: Any) -> None:
                Delayed.seconds = seconds
                pipe.step(params, batch)

            times = interleave_ranks(
                {
                    label: partial(step, seconds, pipe, params, batch)
                    for label, seconds in (("with", delay), ("without", 0.0))
                },
                rounds,
            )
            exposed = times.median("with") - times.median("without")
            expected = simulated(schedule, nap, delay) - simulated(schedule, nap, 0.0)
            begun = [a for a in schedule.actions[0] if a.op in _COLLECTIVE]
            delays = len(begun) * delay
            table.append(
                [
                    str(count),
                    f"{gather}, {reduce}",
                    1e3 * times.median("without"),
                    1e3 * delays,
                    1e3 * exposed,
                    1e3 * expected,
                    exposed / expected,
                    exposed / delays,
                ]
            )
    return table


_COLLECTIVE: Final = (fpipe.schedule.Op.UNSHARD, fpipe.schedule.Op.REDUCE_GRAD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4], help="of a rank")
    parser.add_argument("--nap", type=float, default=20.0, help="milliseconds of each F, I and W")
    parser.add_argument("--delay", type=float, default=40.0, help="milliseconds of a collective")
    add_arguments(parser, rounds=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    nap, delay = arguments.nap / 1e3, arguments.delay / 1e3
    rows = on_ranks(4, measure, arguments.stages, nap, delay, arguments.rounds)
    report = Report(
        title="Collectives of two replicas, each made longer by a delay",
        command=command("benchmarks.data_parallel.exposed"),
        machine=machine(CPU),
        settings={
            "F, I and W, ms": arguments.nap,
            "delay, ms": arguments.delay,
            "microbatches": 8,
            "rounds": arguments.rounds,
        },
        columns=COLUMNS,
        rows=rows,
    )
    publish(report, arguments)


if __name__ == "__main__":
    main()
