"""How close does the search come to the lower bound, and to the published families?

    python -m benchmarks.search.run [--iterations 2000] [--ranks 4 8] [--families | --large]

Every case is a placement, a cost and a memory. Printed: the bound, the best family of that
placement that fits the memory, what the search found, its gap, and how long it took.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from random import Random
from statistics import fmean
from typing import Final

from fpipe import Cost, ScheduleError, schedules, search, simulate
from fpipe.schedule.placements import linear, looped, vee

PLACEMENTS: Final = {"linear": linear, "looped": lambda ranks: looped(ranks, 2), "vee": vee}
MEMORIES: Final = (0.5, 0.75, 1.0, 2.0)  # of p microbatches
PUBLISHED: Final = (
    "zb_h1",
    "zb_h2",
    "zb_auto",
    "zbv",
    "v_half",
    "v_min",
    "interleaved_zero_bubble",
    "dualpipev",
    "group_1f1b",
)


def costs(ranks: int, stages: int) -> dict[str, Cost]:
    """Unit, uneven, and latency-bound costs, by what the table calls them."""
    random = Random(ranks)

    def uneven(mean: float) -> list[float]:
        return [round(mean * random.uniform(0.7, 1.3) * ranks / stages, 1) for _ in range(stages)]

    return {
        "unit": Cost(f=1, i=1, w=1),
        "10/12/8, c 1": Cost(f=10, i=12, w=8, comm=1),
        "unit, c 0.5": Cost(f=1, i=1, w=1, comm=0.5),
        "uneven stages": Cost(f=uneven(10), i=uneven(12), w=uneven(8), comm=1),
    }


def best_family(
    ranks: int, count: int, placement: tuple[int, ...], cost: Cost, limit: float
) -> str:
    """The best family of the placement whose peak fits, with its makespan."""
    found: list[tuple[float, str]] = []
    for name in schedules.FAMILIES:
        try:
            schedule = schedules.get(name, ranks=ranks, microbatches=count)
        except ScheduleError:
            continue
        if schedule.placement == placement:
            timeline = simulate(schedule, cost)
            if max(timeline.peak) <= limit:
                found.append((timeline.makespan, name))
    return "{1} {0:g}".format(*min(found)) if found else "none fits"


def cases(
    ranks: int, placements: list[str]
) -> Iterator[tuple[str, tuple[int, ...], str, Cost, float]]:
    """Name and value of each placement and cost, and each memory that admits a schedule."""
    for name in placements:
        placement = PLACEMENTS[name](ranks)
        for label, cost in costs(ranks, len(placement)).items():
            for memory in MEMORIES:
                if memory * ranks >= 1:
                    yield name, placement, label, cost, memory * ranks


def sweep(ranks: int, placements: list[str], seconds: float, iterations: int | None) -> None:
    """Every placement, cost and memory."""
    print("| p | m | placement | cost | memory | bound | best family | searched | gap | seconds |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    gaps: dict[str, list[float]] = {}
    count = 3 * ranks
    for name, placement, label, cost, memory in cases(ranks, placements):
        family = best_family(ranks, count, placement, cost, memory)
        start = time.perf_counter()
        found = search(
            ranks=ranks,
            microbatches=count,
            cost=cost,
            memory=memory,
            placement=placement,
            seconds=seconds,
            iterations=iterations,
        )
        took = time.perf_counter() - start
        gaps.setdefault(name, []).append(found.gap)
        print(
            f"| {ranks} | {count} | {name} | {label} | {memory:g} | {found.bound:g} | {family} "
            f"| {found.value:g} | {found.gap:.1%} | {took:.1f} |",
            flush=True,
        )
    parts = ", ".join(f"{name} {fmean(values):.1%}" for name, values in gaps.items())
    mean = fmean(gap for values in gaps.values() for gap in values)
    print(f"\nMean gap at p = {ranks}: {mean:.1%} ({parts}).\n", flush=True)


def against_families(ranks: int, seconds: float, iterations: int | None) -> None:
    """Each published schedule against a search on its placement, in its peak memory."""
    print("| p | m | family | cost | peak | family takes | searched | bound |")
    print("|---|---|---|---|---|---|---|---|")
    count = 3 * ranks
    for name in PUBLISHED:
        schedule = schedules.get(name, ranks=ranks, microbatches=count)
        for label, cost in costs(ranks, schedule.num_stages).items():
            timeline = simulate(schedule, cost)
            found = search(
                ranks=ranks,
                microbatches=count,
                cost=cost,
                memory=max(timeline.peak),
                placement=schedule.placement,
                seconds=seconds,
                iterations=iterations,
            )
            print(
                f"| {ranks} | {count} | {name} | {label} | {max(timeline.peak):g} "
                f"| {timeline.makespan:g} | {found.value:g} | {found.bound:g} |",
                flush=True,
            )
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each search")
    parser.add_argument("--iterations", type=int, help="search so long instead, on any machine")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="how many, each alone")
    parser.add_argument(
        "--placements", nargs="+", choices=list(PLACEMENTS), default=list(PLACEMENTS)
    )
    parser.add_argument("--families", action="store_true", help="against each family, at its peak")
    parser.add_argument("--large", action="store_true", help="p = 64, m = 2048")
    arguments = parser.parse_args()
    if arguments.large:
        start = time.perf_counter()
        found = search(
            ranks=64, microbatches=2048, cost=Cost(10, 12, 8, comm=1), memory=64, seconds=10
        )
        print(f"p = 64, m = 2048: {found!r} in {time.perf_counter() - start:.0f} s")
        return
    for ranks in arguments.ranks:
        if arguments.families:
            against_families(ranks, arguments.seconds, arguments.iterations)
        else:
            sweep(ranks, arguments.placements, arguments.seconds, arguments.iterations)


if __name__ == "__main__":
    main()
