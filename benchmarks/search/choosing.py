"""Which schedule wins where: the best family of each placement, and what a search finds.

python -m benchmarks.search.choosing                 # the table of docs/choosing.md
python -m benchmarks.search.choosing --iterations 0  # families alone
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fpipe import (
    Cost,
    Jitter,
    Schedule,
    ScheduleError,
    SearchResult,
    Timeline,
    schedules,
    search,
    simulate,
)
from fpipe.schedule.placements import linear, looped
from fpipe.schedule.simulator import with_whole_stage

RANKS: Final = 4
MICROBATCHES: Final = 12
PLAIN: Final = Cost(f=10, i=10, w=10)
PLACEMENTS: Final = ("linear", "looped", "V")


@dataclass(frozen=True)
class World:
    """A cost, the memory of a rank in microbatches, and how times vary."""

    name: str
    cost: Cost
    memory: float = 4.0
    jitter: Jitter | None = None


def between(groups: Sequence[int], within: float, across: float) -> tuple[tuple[float, ...], ...]:
    """A table by pairs of ranks: one value within groups of ranks, another from group to group."""
    return tuple(tuple(within if a == b else across for b in groups) for a in groups)


CUT: Final = between((0, 0, 1, 1), 0, 28)
HOSTS: Final = ((0, 0, 9, 9), (1, 1, 9, 9), (9, 9, 2, 2), (9, 9, 3, 3))  # 9 joins the hosts
LENGTHS: Final = (8, 1, 7, 2, 6, 3, 5, 4, 8, 2, 6, 4)
MEAN: Final = sum(LENGTHS) / len(LENGTHS)
SQUARE: Final = sum(length**2 for length in LENGTHS) / len(LENGTHS)

WORLDS: Final = (
    World("nothing else: f = i = w = 10", PLAIN),
    World("memory 8", PLAIN, memory=8),
    World("memory 3", PLAIN, memory=3),
    World("memory 2", PLAIN, memory=2),
    World("weight gradients take 20", replace(PLAIN, w=20)),
    World("messages arrive 14 later (`comm`)", replace(PLAIN, comm=14)),
    World("messages take a link for 14 (`transfer`)", replace(PLAIN, transfer=14)),
    World("… which both ways share (`shared`)", replace(PLAIN, transfer=14, shared=True)),
    World("one slow cut: 28 between ranks 1 and 2", replace(PLAIN, transfer=CUT)),
    World(
        "two hosts, and one link of 14 between them",
        replace(PLAIN, transfer=between((0, 0, 1, 1), 1, 14), shared=HOSTS),
    ),
    World("sends of 5 occupy their rank (`blocking`)", replace(PLAIN, transfer=5, blocking=True)),
    World("reductions of 120 (`reduce_grad`)", replace(PLAIN, comm=1, reduce_grad=120)),
    World(
        "… which occupy the rank",
        replace(PLAIN, comm=1, reduce_grad=120, collective_lane=False),
    ),
    World("updates of 60 (`update`)", replace(PLAIN, comm=1, update=60)),
    World("the last rank at 0.8 (`speed`)", replace(PLAIN, comm=1, speed=(1, 1, 1, 0.8))),
    World("F and B overlap at 0.7 (`pair`), memory 4.5", replace(PLAIN, pair=0.7), memory=4.5),
    World("each action varies by 10 %", replace(PLAIN, comm=1), jitter=Jitter(each=0.1)),
    World(
        "one in fifty stalls for 40",
        replace(PLAIN, comm=1),
        jitter=Jitter(each=0.05, stalls=0.02, stall=40),
    ),
    World(
        "lengths 1 to 8: times by the square (`sizes`)",
        replace(
            PLAIN,
            sizes=tuple(length**2 / SQUARE for length in LENGTHS),
            memory_sizes=tuple(length / MEAN for length in LENGTHS),
        ),
    ),
)


def families(world: World) -> Iterator[Schedule]:
    """Every family that there is for the size, with two stages a rank, and four."""
    for name in schedules.FAMILIES:
        for stages in (None, 4):
            extra = {"cost": world.cost, "memory": world.memory}
            extra = {key: value for key, value in extra.items() if schedules.takes(name, key)}
            if stages is not None and not schedules.takes(name, "stages_per_rank"):
                continue
            try:
                yield schedules.get(
                    name,
                    ranks=RANKS,
                    microbatches=MICROBATCHES,
                    stages_per_rank=stages,
                    **extra,  # type: ignore[arg-type]
                )
            except ScheduleError:
                continue  # of another number of microbatches


def played(schedule: Schedule, world: World) -> Timeline:
    """The schedule with the work of the world."""
    return simulate(with_whole_stage(schedule, world.cost), world.cost, jitter=world.jitter)


def kind_of(placement: Sequence[int]) -> str:
    """The name of a placement."""
    stages = len(placement) // RANKS
    if tuple(placement) == linear(RANKS):
        return "linear"
    return "looped" if tuple(placement) == looped(RANKS, stages) else "V"


def best_of(world: World) -> dict[str, Timeline]:
    """Of each placement the family that is fastest in the memory."""
    best: dict[str, Timeline] = {}
    for schedule in families(world):
        timeline = played(schedule, world)
        if max(timeline.peak) > world.memory * (1 + 1e-9):
            continue
        kind = kind_of(schedule.placement)
        if kind not in best or timeline.mean < best[kind].mean * (1 - 1e-9):
            best[kind] = timeline
    return best


def searched(world: World, iterations: int) -> SearchResult:
    """The best schedule that searches find on all placements of the table."""
    results = []
    for placement in (None, looped(RANKS, 4)):
        with contextlib.suppress(ScheduleError):  # the memory has no room for so many stages
            results.append(
                search(
                    ranks=RANKS,
                    microbatches=MICROBATCHES,
                    cost=world.cost,
                    memory=world.memory,
                    placement=placement,
                    objective="makespan" if world.jitter is None else "robust",
                    jitter=world.jitter or 0.05,
                    iterations=iterations,
                )
            )
    return min(results, key=lambda result: result.value)


def shown(time: float) -> str:
    """A time to a tenth."""
    return f"{time:.1f}".removesuffix(".0")


def repeated(placement: Sequence[int]) -> str:
    """How many stages a rank has, where these are more than two."""
    stages = len(placement) // RANKS
    return f" ×{stages}" if stages > 2 else ""


def row(world: World, iterations: int) -> str:
    """The line of a world in the table."""
    best = best_of(world)
    least = min((timeline.mean for timeline in best.values()), default=0.0)
    cells = []
    for kind in PLACEMENTS:
        if kind not in best:
            cells.append("–")
            continue
        timeline = best[kind]
        value = shown(timeline.mean)
        wins = timeline.mean <= least * (1 + 1e-9)
        name = f"`{timeline.schedule.name}`" + repeated(timeline.schedule.placement)
        cells.append(f"{'**' * wins}{value}{'**' * wins} {name}")
    if iterations:
        result = searched(world, iterations)
        placement = result.schedule.placement
        cells.append(f"{shown(result.value)} {kind_of(placement)}{repeated(placement)}")
    return f"| {world.name} | {' | '.join(cells)} |"


def table(iterations: int, worlds: Sequence[World] = WORLDS) -> str:
    """The table as Markdown."""
    heads = ["world", *PLACEMENTS, *(["search"] if iterations else [])]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(row(world, iterations) for world in worlds)])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=200, metavar="N", help="of each search")
    print(table(parser.parse_args().iterations))


if __name__ == "__main__":
    main()
