"""How much sooner is an ensemble done in one pipeline than without one, or member by member?

    python -m benchmarks.ensemble.run --kind members
    python -m benchmarks.ensemble.run --kind microbatches
    python -m benchmarks.ensemble.run --kind ranks

See the README beside this file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
from benchmarks.contest import schedule_of
from benchmarks.ensemble.peers import accumulated, trained, whole_batch
from benchmarks.harness import (
    Cell,
    Report,
    add_arguments,
    add_uncompiled,
    command,
    interleave,
    keep_memory,
    machine,
    publish,
)
from benchmarks.models import Block, blocks, init_blocks, mean_square
from benchmarks.ranks import interleave_ranks, on_ranks
from fpipe import pytree

STAGES: Final = 2
MEMBERS: Final = (1, 2, 4, 8, 16)
MICROBATCHES: Final = (1, 2, 4, 8)
HYPER: Final[dict[str, Any]] = {"lr": 1e-4}

Params = list[list[Block]]
Cases = dict[str, Callable[[], Any]]


class Size(NamedTuple):
    """Shapes of one member."""

    width: int = 64
    length: int = 16
    rows: int = 8  # in a batch
    microbatches: int = 4
    schedule: str = "1F1B"


def whole(params: Params, batch: Tensor) -> Tensor:
    """The loss of one member without a pipeline."""
    x = batch
    for stage in params:
        x = blocks(stage, x)
    return mean_square(x, batch)


def batch_of(size: Size) -> Tensor:
    """The same rows for all members."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size.rows, size.length, size.width, generator=generator)


def alone(size: Size, members: int) -> list[Params]:
    """Fresh parameters of each member: a block per stage."""
    made = [
        init_blocks(STAGES, size.width, torch.device("cpu"), torch.float32, seed)
        for seed in range(members)
    ]
    return [[[block] for block in each] for each in made]


def stack(each: list[Any]) -> Any:
    """All members' trees along a new first dimension."""
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *each)


def pipe_of(size: Size, *, compile: bool, **options: Any) -> fpipe.Pipeline:
    """The pipeline of one member."""
    schedule = schedule_of(size.schedule, STAGES, size.microbatches)
    return fpipe.pipeline([blocks] * STAGES, mean_square, schedule, compile=compile, **options)


def training(pipe: fpipe.Pipeline, stacked: Any, batch: Tensor) -> Callable[[], Any]:
    """A whole training step of an ensemble, which writes into its own parameters."""
    alone = fpipe.train(pipe, torch.optim.AdamW, donate=True, **HYPER)
    trainer = fpipe.vmap(alone, in_dims=(0, None))
    params = pipe.local(pytree.tree_map(torch.clone, stacked))
    state = trainer.init(params)
    return lambda: trainer.step(params, state, batch)


def cases_of(size: Size, members: int, *, compile: bool) -> Cases:
    """The ways to take one step of each member, in one process."""
    batch, each, pipe = batch_of(size), alone(size, members), pipe_of(size, compile=compile)
    stacked, ensemble = stack(each), fpipe.vmap(pipe)
    peer = accumulated(whole, size.microbatches, compile=compile)
    at_once = whole_batch(whole, compile=compile)
    own = pytree.tree_map(torch.clone, stacked)
    step = trained(peer, own, **HYPER)
    return {
        "loop": lambda: [pipe.step(params, batch) for params in each],
        "ensemble": lambda: ensemble.step(stacked, batch),
        "accumulated": lambda: peer(stacked, batch),
        "whole batch": lambda: at_once(stacked, batch),
        "trained ensemble": training(pipe, stacked, batch),
        "trained peer": lambda: step(batch),
    }


def check(cases: Cases) -> None:
    """All compute the same, or the comparison means nothing."""
    expected = stack([[step.loss, step.grads] for step in cases["loop"]()])
    loss, grads = cases["ensemble"]()
    found = {"ensemble": [loss, grads]}
    for name in ("accumulated", "whole batch"):
        found[name] = list(reversed(cases[name]()))
    found["trained"] = [cases["trained peer"](), expected[1]]
    expected_trained = cases["trained ensemble"]().loss
    assert torch.allclose(found["trained"][0], expected_trained, rtol=1e-4)
    for name, tree in found.items():
        for ours, theirs in zip(pytree.flatten(tree)[0], pytree.flatten(expected)[0], strict=True):
            difference = (ours - theirs).norm() / theirs.norm()
            assert difference < 1e-4, f"{name} differs by {difference:.1e}"


def by_members(size: Size, numbers: list[int], rounds: int, *, compile: bool) -> list[list[Cell]]:
    """A row for each number of members."""
    rows: list[list[Cell]] = []
    for members in numbers:
        # Without this a new number of members would be compiled with a symbol in its place.
        torch.compiler.reset()
        cases = cases_of(size, members, compile=compile)
        check(cases)
        timings = interleave(cases, rounds)
        rows.append(
            [
                str(members),
                *(timings.median(name) * 1e3 for name in cases),
                timings.ratio("ensemble", "loop"),
                timings.ratio("ensemble", "accumulated"),
                timings.ratio("trained ensemble", "trained peer"),
            ]
        )
    return rows


def by_microbatches(
    size: Size, members: int, numbers: list[int], rounds: int, *, compile: bool
) -> list[list[Cell]]:
    """A row for each number of microbatches of the same batch."""
    rows: list[list[Cell]] = []
    for number in numbers:
        torch.compiler.reset()
        cases = cases_of(size._replace(microbatches=number), members, compile=compile)
        check(cases)
        names = ("ensemble", "accumulated", "whole batch")
        timings = interleave({name: cases[name] for name in names}, rounds)
        rows.append(
            [
                str(number),
                *(timings.median(name) * 1e3 for name in names),
                timings.ratio("ensemble", "accumulated"),
                timings.ratio("ensemble", "whole batch"),
                timings.ratio("accumulated", "whole batch"),
            ]
        )
    return rows


def on_rank(
    rank: int, size: Size, numbers: list[int], rounds: int, compile: bool
) -> list[list[Cell]]:
    """What one of two processes does; the first one is the peer too, with one thread and two."""
    rows: list[list[Cell]] = []
    for members in numbers:
        torch.compiler.reset()
        batch, stacked = batch_of(size), stack(alone(size, members))
        pipe = pipe_of(size, compile=compile, group=dist.group.WORLD)
        cases: Cases = {
            "ensemble": partial(fpipe.vmap(pipe).step, pipe.local(stacked), batch),
            "trained ensemble": training(pipe, stacked, batch),
        }
        for threads in (1, 2):
            cases |= _peers(rank, size, stacked, batch, threads, compile=compile)
        timings = interleave_ranks(cases, rounds)
        ratio = timings.ratio
        rows.append(
            [
                str(members),
                *(timings.median(name) * 1e3 for name in cases),
                ratio("peer, threads: 1", "ensemble"),
                ratio("peer, threads: 2", "ensemble"),
                ratio("trained peer, threads: 1", "trained ensemble"),
                ratio("trained peer, threads: 2", "trained ensemble"),
            ]
        )
    return rows


def _peers(
    rank: int, size: Size, stacked: Any, batch: Tensor, threads: int, *, compile: bool
) -> Cases:
    """The peer with a number of threads, on the first rank, while the other one waits."""
    names = [f"{kind}, threads: {threads}" for kind in ("peer", "trained peer")]
    if rank:
        return dict.fromkeys(names, lambda: None)
    # Compiled code has the number of threads in it.
    torch.set_num_threads(threads)
    torch.compiler.reset()
    peer = accumulated(whole, size.microbatches, compile=compile)
    step = trained(peer, pytree.tree_map(torch.clone, stacked), **HYPER)
    runs = (lambda: peer(stacked, batch), lambda: step(batch))
    for run in runs:
        run()
    torch.set_num_threads(1)

    def with_threads(run: Callable[[], Any]) -> Callable[[], Any]:
        def timed() -> Any:
            torch.set_num_threads(threads)
            try:
                return run()
            finally:
                torch.set_num_threads(1)

        return timed

    return dict(zip(names, map(with_threads, runs), strict=True))


COLUMNS: Final = {
    "members": (
        "members",
        "Python loop, ms",
        "ensemble, ms",
        "peer, ms",
        "whole batch, ms",
        "trained ensemble, ms",
        "trained peer, ms",
        "ensemble / loop",
        "ensemble / peer",
        "trained ensemble / peer",
    ),
    "microbatches": (
        "microbatches",
        "ensemble, ms",
        "peer, ms",
        "whole batch, ms",
        "ensemble / peer",
        "ensemble / whole batch",
        "peer / whole batch",
    ),
    "ranks": (
        "members",
        "ensemble on 2 ranks, ms",
        "trained, ms",
        "peer, 1 thread, ms",
        "trained, ms",
        "peer, 2 threads, ms",
        "trained, ms",
        "1 thread / ranks",
        "2 threads / ranks",
        "trained: 1 thread / ranks",
        "trained: 2 threads / ranks",
    ),
}
TITLES: Final = {
    "members": "A step of N members at once, without a pipeline, and one by one",
    "microbatches": "A step of an ensemble in more and more microbatches",
    "ranks": "A step of an ensemble on two ranks, and without a pipeline",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=list(COLUMNS), default="members")
    for name, value in Size._field_defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--members", type=int, nargs="+", help="of each row; of all rows the first")
    add_uncompiled(parser)
    add_arguments(parser, rounds=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    size = Size(**{name: getattr(arguments, name) for name in Size._fields})
    compile, rounds, kind = not arguments.uncompiled, arguments.rounds, arguments.kind
    settings: dict[str, Cell] = {**size._asdict()}
    if kind == "members":
        rows = by_members(size, arguments.members or list(MEMBERS), rounds, compile=compile)
    elif kind == "microbatches":
        members = (arguments.members or [8])[0]
        settings |= {"members": str(members), "microbatches": None}
        numbers = [number for number in MICROBATCHES if number <= size.rows]
        rows = by_microbatches(size, members, numbers, rounds, compile=compile)
    else:
        numbers = arguments.members or list(MEMBERS[2:])
        rows = on_ranks(2, on_rank, size, numbers, rounds, compile)
    report = Report(
        title=TITLES[kind],
        command=command("benchmarks.ensemble.run"),
        machine=machine(torch.device("cpu")),
        settings={
            **{name: value for name, value in settings.items() if value is not None},
            "ranks": STAGES,
            "compiled": not arguments.uncompiled,
            "rounds": rounds,
        },
        columns=COLUMNS[kind],
        rows=rows,
    )
    publish(report, arguments)


if __name__ == "__main__":
    main()
